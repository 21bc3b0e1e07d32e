"""Tasks of the training runs: a model, its batches, and one run with its held-out loss and learning curve.

Weights are float32 and steps run under autocast to bfloat16, as fine-tuning does. Nothing is dropped out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from truth_data import (
    CANVAS,
    Batch,
    Batches,
    Data,
    digit_batches,
    library_folder,
    package_batches,
    package_folders,
    text_batches,
)
from truth_pairs import Pairs, Retriever, encoder, find_pairs, pair_batches

from lowmem_patch import patch_model, patch_report
from lowmem_patch.config import PatchConfig, load_config, preset_names

CURVE_STEPS = 20  # of which the mean loss is one point of a learning curve
BASE_SEED = 99
HELD_OUT_SEED = 7
UNPATCHED, HALVES = "unpatched", "unpatched, in halves"
PRESETS = ("exact", "auto", "paper", "compact")
CODES = {f"codes, {bits} bit{'s' * (bits > 1)}": bits for bits in (1, 2, 3, 4)}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of models, batches and runs."""

    steps: int = 300
    rows: int = 32
    length: int = 256  # tokens
    width: int = 256
    layers: int = 4
    held_out: int = 12  # batches
    corpus: int = 8_000_000  # bytes

    @property
    def minilm_layers(self) -> int:
        """All six, but in a trial."""
        return 6 if self.layers == Sizes.layers else self.layers

    @property
    def pair_tokens(self) -> int:
        """Of a docstring's first paragraph, and of a function's beginning."""
        return min(64, self.length)


TRIAL = Sizes(steps=3, rows=8, length=16, width=32, layers=1, held_out=1, corpus=60_000)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run; ``length`` is a multiple of the task's own number of steps."""

    task: str
    variant: str
    seed: int
    length: int = 1


@dataclasses.dataclass(frozen=True)
class Base:
    """The training of a task's model for others to adapt; ``proof`` is a run that it must give again."""

    task: str
    proof: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A model from scratch, or adapters (``adapted``: what their names end with) on one that was trained."""

    title: str
    build: Callable[[Sizes, Data], nn.Module]
    corpus: str  # of `Data`: python, adapted, packages, digits or pairs
    rate: float
    weight_decay: float
    steps: float = 1  # times those of the sizes
    base: str | None = None  # the task that trains what is adapted
    adapted: tuple[str, ...] | str = ()

    @property
    def unit(self) -> str:
        return "bits a byte" if self.corpus in ("python", "adapted") else "nats"


class Digits(nn.Module):
    """timm's ViT with the call of a transformers classifier."""

    def __init__(self, sizes: Sizes, data: Data) -> None:
        from timm.models.vision_transformer import VisionTransformer

        super().__init__()
        self.vit = VisionTransformer(
            img_size=CANVAS, patch_size=3, in_chans=1, num_classes=10, depth=sizes.layers,
            embed_dim=sizes.width // 2, num_heads=4, global_pool="avg",
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.vit(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def llama(sizes: Sizes, data: Data) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    # as many classes again as there are bytes: wide enough that the head is computed in chunks
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=max(256, 2 * sizes.width), hidden_size=sizes.width, use_cache=False,
            intermediate_size=3 * sizes.width, num_hidden_layers=sizes.layers,
            num_attention_heads=4, max_position_embeddings=sizes.length,
        )
    )  # fmt: skip


def gpt2(sizes: Sizes, data: Data) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=max(256, 2 * sizes.width), n_embd=sizes.width, n_layer=sizes.layers,
            n_head=4, n_positions=sizes.length, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def roberta(sizes: Sizes, data: Data) -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=256, hidden_size=sizes.width, intermediate_size=4 * sizes.width,
            num_hidden_layers=sizes.layers, num_attention_heads=4, num_labels=len(data.packages),
            # it counts positions from the padding's number on; no byte of a source is 0
            pad_token_id=0, max_position_embeddings=sizes.length + 2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def minilm(sizes: Sizes, data: Data) -> nn.Module:
    """From its real weights: seeds differ in their batches alone."""
    assert data.pairs is not None
    return Retriever(encoder(data.pairs.folder, sizes.minilm_layers))


def minilm_pairs(folder: Path, sizes: Sizes) -> Pairs:
    """As many as the rows of so many steps; ``folder`` holds the weights."""
    sources = package_folders() | {"python": library_folder()}
    shape = (sizes.steps * sizes.rows, sizes.pair_tokens)
    return find_pairs(folder, sources, sizes.minilm_layers, shape)


TASKS = {
    "llama": Task("LLaMA from scratch", llama, "python", 2e-3, 0.1),
    "gpt2": Task("GPT-2 from scratch", gpt2, "python", 2e-3, 0.1),
    "llama-lora": Task(
        "LLaMA, LoRA on all Linears", llama, "adapted", 2e-3, 0.0, base="llama", adapted="all-linear"
    ),
    "gpt2-qkv": Task(
        "GPT-2, LoRA on qkv alone", gpt2, "adapted", 2e-3, 0.0, base="gpt2", adapted=("c_attn",)
    ),
    "vit": Task("ViT on digits", Digits, "digits", 2e-3, 0.05, steps=2.5),
    "roberta": Task("RoBERTa tells packages apart", roberta, "packages", 5e-4, 0.01, steps=1.2),
    "minilm": Task("MiniLM finds a docstring's function", minilm, "pairs", 1e-4, 0.01, steps=2),
}  # fmt: skip


def variants() -> list[str]:
    """Those that this version of the package knows."""
    presets = [preset for preset in PRESETS if preset in preset_names()]
    return [UNPATCHED, HALVES, *presets, *CODES]


def config_of(variant: str) -> PatchConfig | None:
    """What is patched; None for the unpatched model. Codes are the preset ``exact`` with codes."""
    if variant in (UNPATCHED, HALVES):
        return None
    if variant in CODES:
        exact = load_config("exact")
        return dataclasses.replace(exact, activations="codes", bits=CODES[variant], name=variant)
    return load_config(variant)


def base_path(folder: Path, task: str) -> Path:
    """Where the weights of a task's model lie that others adapt."""
    return folder / f"base-{task}.pt"


class Runs:
    """All runs of one process: its data lie on its device."""

    def __init__(self, data: Data, sizes: Sizes, device: str, folder: Path) -> None:
        self.data, self.sizes, self.device = data.to(device), sizes, device
        self.folder = folder  # of trained bases

    def train_base(self, base: Base) -> None:
        """Train what ``base.task`` gives others to adapt, twice as long as the task itself.

        Raises:
            RuntimeError: the run ``base.proof`` comes out otherwise, so that new runs would be no pairs.
        """
        model = self._model(TASKS[base.task], BASE_SEED)
        steps = self._steps(base.task, 2)
        self._train(model, TASKS[base.task], BASE_SEED, steps, split=False)
        trial = copy.copy(self)
        trial.folder = self.folder / "partial"
        trial.folder.mkdir(exist_ok=True)
        partial = base_path(trial.folder, base.task)
        torch.save(model.state_dict(), partial)
        if base.proof is not None:
            job = Job(**{field.name: base.proof[field.name] for field in dataclasses.fields(Job)})
            found = trial.run(job)
            if any(found[key] != base.proof[key] for key in ("loss", "curve")):
                raise RuntimeError(
                    f"this is not the base of the file's runs: {job.task}, seed {job.seed}, "
                    f"{job.variant} has another loss or learning curve from it ({found['loss']}, "
                    f"in the file {base.proof['loss']}). New runs would be no pairs of those: "
                    "train all runs of the task again in a new file (--out)"
                )
        partial.rename(base_path(self.folder, base.task))

    def run(self, job: Job) -> dict[str, Any]:
        """The result of one run: a line of the results.

        ``loss`` is the mean held-out loss in the task's unit, ``accuracy`` is that of classifiers, ``curve``
        holds the means of each 20 training losses, ``saved`` the bytes that autograd holds by the plan
        before and after the patch, ``approximate`` the number of sites with an approximate gradient,
        ``bits`` those of its codes, ``data`` the fingerprint of what the task alone reads.
        """
        begin = time.perf_counter()
        task = TASKS[job.task]
        model = self._model(task, job.seed)
        steps = self._steps(job.task, job.length)
        facts: dict[str, Any] = {}
        config = config_of(job.variant)
        if config is not None:
            inputs = self._batches(task, "train", 1, job.seed)(0)
            with self._autocast():
                patch_model(model, config, example_inputs=inputs, strict=True)
            report = patch_report(model)
            facts["saved"] = [report.saved_before, report.saved_after]
            facts["approximate"] = len(report.approximate)
            if any(site.strategy == "codes" for site in report.sites):
                facts["bits"] = config.bits
        if task.corpus == "pairs":
            assert self.data.pairs is not None
            facts["data"] = self.data.pairs.fingerprint
        curve = self._train(model, task, job.seed, steps, split=job.variant == HALVES)
        loss, accuracy = self._held_out(model, task)
        if accuracy is not None:
            facts["accuracy"] = round(accuracy, 6)
        return {
            **dataclasses.asdict(job), "steps": steps, "loss": round(loss, 6), **facts,
            "curve": curve, "seconds": round(time.perf_counter() - begin, 2),
        }  # fmt: skip

    def _steps(self, task: str, times: float) -> int:
        return round(self.sizes.steps * TASKS[task].steps * times)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16)

    def _model(self, task: Task, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = task.build(self.sizes, self.data)
        if task.base is not None:
            model.load_state_dict(torch.load(base_path(self.folder, task.base), weights_only=True))
            targets = task.adapted if isinstance(task.adapted, str) else list(task.adapted)
            rank = LoraConfig(
                r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=task.build is gpt2
            )
            model = get_peft_model(model, rank)  # type: ignore[arg-type, assignment]  # a wrapper in its place
        return model.to(self.device).train()

    def _batches(self, task: Task, part: str, steps: int, seed: int) -> Batches:
        data, rows = self.data, self.sizes.rows
        shape = (rows, self.sizes.length)
        if task.corpus == "digits":
            images, labels = getattr(data.digits, part), getattr(data.digit_labels, part)
            return digit_batches(images, labels, steps, 8 * rows, seed)
        if task.corpus == "packages":
            shape = (4 * rows, self.sizes.length)
            corpora = [getattr(split, part) for split in data.packages.values()]
            return package_batches(corpora, steps, shape, seed)
        if task.corpus == "pairs":
            many = rows if part == "train" else 4 * rows
            return pair_batches(getattr(data.pairs, part), steps, many, seed)
        return text_batches(getattr(getattr(data, task.corpus), part), steps, shape, seed)

    def _train(
        self, model: nn.Module, task: Task, seed: int, steps: int, split: bool
    ) -> list[float]:
        """Train, and give the learning curve; ``split`` computes each batch in two halves."""
        batches = self._batches(task, "train", steps, 1000 + seed)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(
            weights, lr=task.rate, weight_decay=task.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, steps, pct_start=0.2)
        losses = torch.zeros(steps, device=self.device)
        for step in range(steps):
            parts = _halves(batches(step)) if split else [batches(step)]
            for part in parts:
                with self._autocast():
                    loss = model(**part)["loss"] / len(parts)
                loss.backward()
                losses[step] += loss.detach()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        scale = _scale(task)
        return [round(float(part.mean()) * scale, 5) for part in losses.cpu().split(CURVE_STEPS)]

    @torch.no_grad()
    def _held_out(self, model: nn.Module, task: Task) -> tuple[float, float | None]:
        """Mean loss over the same batches for every run, and the share of right classes."""
        count = self.sizes.held_out
        batches = self._batches(task, "held_out", count, HELD_OUT_SEED)
        model.eval()
        loss, right, rows = torch.zeros((), device=self.device), 0, 0
        for step in range(count):
            batch = batches(step)
            with self._autocast():
                found = model(**batch)
            loss += found["loss"].float() / count
            if _scale(task) == 1:
                right = right + (found["logits"].argmax(-1) == batch["labels"]).sum()
                rows += len(batch["labels"])
        return float(loss) * _scale(task), float(right) / rows if rows else None


def _scale(task: Task) -> float:
    return 1 / math.log(2) if task.unit == "bits a byte" else 1


def _halves(batch: Batch) -> list[Batch]:
    pairs = {name: value.chunk(2) for name, value in batch.items()}
    return [{name: pair[number] for name, pair in pairs.items()} for number in (0, 1)]
