"""The bundled trained models, their data, and their fine-tuning in `lowmem-patch demo`.

Everything here works offline: the weights ship with the package, the text is the standard library
of the running interpreter, and the held-out digits lie beside the weights that never saw them.

`demo_tasks()` gives one small fine-tuning task per model; `compare(task, config)` runs it on the
stock and on the patched model and returns losses, scores and saved bytes of both.
"""

from __future__ import annotations

import dataclasses
import math
import sysconfig
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import transformers
from torch import Tensor, nn

from lowmem_patch.api import patch_model, patch_report
from lowmem_patch.config import ConfigLike
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.tracing.saved_bytes import SavedBytes, saved_bytes

LLAMA_FOLDER = Path(__file__).parent / "assets" / "tiny-llama"
VIT_FOLDER = Path(__file__).parent / "assets" / "tiny-vit"

Batch = dict[str, Tensor]
_ROWS, _LENGTH = 8, 256  # of a batch of text


@dataclasses.dataclass(frozen=True)
class DemoTask:
    """A small fine-tuning of a bundled model on data unlike that of its training."""

    name: str
    data: str
    load: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    example_inputs: Batch
    train_batches: list[Batch]
    score: Callable[[nn.Module], float]
    score_name: str
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """One run of a task: the loss of each step, the scores before and after, saved bytes of a step."""

    losses: list[float]
    score_before: float
    score_after: float
    saved: SavedBytes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The same task on the stock model and on the patched one."""

    report: PatchReport
    stock: FineTuning
    patched: FineTuning


def load_demo_llama() -> Any:
    """The bundled LLaMA, a stock ``LlamaForCausalLM`` in float32, in eval mode."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(LLAMA_FOLDER, dtype=torch.float32)
    return model.eval()


def load_demo_vit() -> Any:
    """The bundled ViT, a stock timm ``VisionTransformer`` in float32, in eval mode."""
    model: Any = timm.create_model(f"local-dir:{VIT_FOLDER}", pretrained=True)
    return model.eval()


def standard_library_files(*, held_out: bool) -> list[Path]:
    """The sources directly in the standard library, one tenth of them held out.

    The file's name decides, so that the split is the same for every version of Python.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path for path in files if (zlib.crc32(path.name.encode()) % 10 == 0) == held_out]


def standard_library_text(*, held_out: bool) -> bytes:
    """The bytes of those sources, one after the other."""
    return b"".join(path.read_bytes() for path in standard_library_files(held_out=held_out))


def text_batches(text: bytes) -> list[Batch]:
    """Consecutive windows of a text as token ids and labels; a rest that fills no batch is left out."""
    whole = len(text) // (_ROWS * _LENGTH) * _ROWS * _LENGTH
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[:whole].long()
    return [{"input_ids": rows, "labels": rows} for rows in tokens.view(-1, _ROWS, _LENGTH)]


def digit_pixels(images: Tensor) -> Tensor:
    """Grey levels 0 to 16, ``[image, row, column]``, as the ViT's pixels from -1 to 1."""
    return images.float().div(8.0).sub(1.0).unsqueeze(1)


def held_out_digits() -> tuple[Tensor, Tensor]:
    """Pixels and labels of the digits that the bundled ViT was not trained on."""
    tensors = safetensors.torch.load_file(VIT_FOLDER / "held_out.safetensors")
    return digit_pixels(tensors["images"]), tensors["labels"].long()


@torch.no_grad()
def bits_per_byte(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean bits that the model needs for a byte; 8 is a blind guess."""
    losses = [float(model(**batch).loss) for batch in batches]
    return sum(losses) / len(losses) / math.log(2)


@torch.no_grad()
def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    """The share of images that the model names rightly."""
    return float((model(pixels).argmax(dim=-1) == labels).float().mean())


def demo_tasks() -> tuple[DemoTask, ...]:
    """The LLaMA on English prose instead of Python, and the ViT on inverted digits."""
    return _prose_task(), _inverted_digits_task()


def compare(task: DemoTask, config: ConfigLike = "exact") -> Comparison:
    """Fine-tune the stock model and the patched one from the same weights on the same batches."""
    model = patch_model(task.load(), config, example_inputs=task.example_inputs)
    report = patch_report(model)
    return Comparison(report, fine_tune(task, task.load()), fine_tune(task, model))


def fine_tune(task: DemoTask, model: nn.Module) -> FineTuning:
    """Train every parameter that wants a gradient, one step per batch of the task."""
    score_before = task.score(model.train(False))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=task.learning_rate
    )
    with saved_bytes(model.train()) as saved:
        task.loss(model, task.train_batches[0])
    losses = []
    for batch in task.train_batches:
        loss = task.loss(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return FineTuning(losses, score_before, task.score(model.train(False)), saved)


def _prose_task() -> DemoTask:
    # The help texts of the language lie beside every interpreter; where a trimmed installation
    # lacks them, sources that were held out take their place.
    topics = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    prose = topics.is_file()
    batches = text_batches(topics.read_bytes() if prose else standard_library_text(held_out=True))
    return DemoTask(
        name="tiny-llama",
        data="English help texts of Python" if prose else "held-out sources of Python",
        load=load_demo_llama,
        loss=lambda model, batch: model(**batch, use_cache=False).loss,
        example_inputs=batches[0],
        train_batches=batches[:16],
        score=lambda model: bits_per_byte(model, batches[-4:]),
        score_name="bits per byte",
        learning_rate=1e-3,
    )


def _inverted_digits_task() -> DemoTask:
    pixels, labels = held_out_digits()
    pixels = -pixels  # dark on light, which the model has never seen
    cut = 2 * len(pixels) // 3
    order = torch.randperm(cut, generator=torch.Generator().manual_seed(0)).repeat(8)
    batches = [{"x": pixels[rows], "labels": labels[rows]} for rows in order.view(-1, 24)]
    return DemoTask(
        name="tiny-vit",
        data="inverted digits",
        load=load_demo_vit,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["labels"]),
        example_inputs={"x": batches[0]["x"]},
        train_batches=batches,
        score=lambda model: accuracy(model, pixels[cut:], labels[cut:]),
        score_name="accuracy",
        learning_rate=1e-3,
    )
