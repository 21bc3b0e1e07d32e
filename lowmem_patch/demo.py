"""The bundled trained models, their data, and what `lowmem-patch demo` does with them: plain data.

Everything here works offline: the weights ship with the package, the text is the standard library
of the running interpreter, and the held-out digits lie beside the weights that never saw them.

`demo_tasks()` gives one small fine-tuning task per model, and `fine_tune(task, model)` runs one on
a model, patched or not, and returns losses, scores and saved bytes, so that two runs can be compared.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import transformers
from torch import Tensor, nn

from lowmem_patch.saved import SavedBytes, saved_bytes

__all__ = [
    "LLAMA_FOLDER",
    "VIT_FOLDER",
    "DemoTask",
    "FineTuning",
    "accuracy",
    "bits_per_byte",
    "demo_batches",
    "demo_tasks",
    "digit_pixels",
    "fine_tune",
    "held_out_digits",
    "load_demo_llama",
    "load_demo_vit",
    "standard_library_batches",
    "standard_library_files",
    "standard_library_text",
]

LLAMA_FOLDER = Path(__file__).parent / "assets" / "tiny-llama"
VIT_FOLDER = Path(__file__).parent / "assets" / "tiny-vit"

Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class DemoTask:
    """A small fine-tuning of a bundled model on data unlike that of its training."""

    name: str
    data: str
    load: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    example_inputs: Batch
    train_batches: tuple[Batch, ...]
    score: Callable[[nn.Module], float]
    score_name: str
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """One run of a task: the loss of each step, the scores around it, and the bytes of one step."""

    losses: tuple[float, ...]
    score_before: float
    score_after: float
    saved: SavedBytes
    seconds: float


def load_demo_llama(dtype: torch.dtype = torch.float32) -> Any:
    """The bundled LLaMA, a stock ``LlamaForCausalLM``, in eval mode."""
    return transformers.LlamaForCausalLM.from_pretrained(LLAMA_FOLDER, dtype=dtype).eval()


def load_demo_vit(dtype: torch.dtype = torch.float32) -> Any:
    """The bundled ViT, a stock timm ``VisionTransformer``, in eval mode."""
    model = timm.create_model(f"local-dir:{VIT_FOLDER}", pretrained=True)
    return model.to(dtype).eval()


def standard_library_files(*, held_out: bool) -> list[Path]:
    """The sources directly in the standard library, one tenth of them held out by their name.

    The name decides, not the content or the order, so that the split is the same for every
    version of Python.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    return [path for path in files if (zlib.crc32(path.name.encode()) % 10 == 0) == held_out]


def standard_library_text(*, held_out: bool) -> bytes:
    """The bytes of those sources, one after the other."""
    return b"".join(path.read_bytes() for path in standard_library_files(held_out=held_out))


def standard_library_batches(
    *, held_out: bool, batch_size: int = 8, length: int = 256, limit: int | None = None
) -> Iterator[Batch]:
    """Consecutive windows of that text as token ids and labels, at most ``limit`` batches."""
    batches = demo_batches(
        standard_library_text(held_out=held_out), batch_size=batch_size, length=length
    )
    yield from batches if limit is None else batches[:limit]


def demo_batches(text: bytes, *, batch_size: int = 8, length: int = 256) -> list[Batch]:
    """Consecutive windows of a text as token ids and labels; what fills no batch is left out."""
    whole = len(text) // (batch_size * length)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[
        : whole * batch_size * length
    ].long()
    windows = tokens.view(whole, batch_size, length)
    return [{"input_ids": window, "labels": window} for window in windows]


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


def fine_tune(task: DemoTask, model: nn.Module) -> FineTuning:
    """Train every parameter that wants a gradient, one step per batch of the task."""
    score_before = task.score(model.eval())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=task.learning_rate)
    with saved_bytes(model.train()) as saved:
        first_loss = task.loss(model, task.train_batches[0])
    del first_loss
    losses = []
    start = time.perf_counter()
    for batch in task.train_batches:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    return FineTuning(tuple(losses), score_before, task.score(model.eval()), saved, seconds)


def _prose_task() -> DemoTask:
    # The help texts of the language: English, a few hundred kilobytes, beside every interpreter.
    # A trimmed installation may lack them; the held-out sources then show the same bytes.
    topics = importlib.util.find_spec("pydoc_data.topics")
    if topics is not None and topics.origin is not None:
        data, text = "English help texts of Python", Path(topics.origin).read_bytes()
    else:
        data, text = "held-out Python sources", standard_library_text(held_out=True)
    batches = demo_batches(text)
    held_out = batches[-8:]
    return DemoTask(
        name="tiny-llama",
        data=data,
        load=load_demo_llama,
        loss=lambda model, batch: model(**batch, use_cache=False).loss,
        example_inputs=batches[0],
        train_batches=tuple(batches[:24]),
        score=lambda model: bits_per_byte(model, held_out),
        score_name="bits per byte",
        learning_rate=1e-3,
    )


def _inverted_digits_task(batch_size: int = 24) -> DemoTask:
    pixels, labels = held_out_digits()
    pixels = -pixels  # dark on light, which the model has never seen
    cut = 2 * len(pixels) // 3
    order = torch.randperm(cut, generator=torch.Generator().manual_seed(0)).repeat(4)
    batches = tuple({"x": pixels[rows], "labels": labels[rows]} for rows in order.split(batch_size))
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
