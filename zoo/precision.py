"""The precisions, and the devices, in which the zoo judges a model, and how a model gets there."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import torch
from torch import nn

from zoo.build import Built


@dataclasses.dataclass(frozen=True)
class Precision:
    """Of the weights and of autocast where it is on; what is judged, and how strictly.

    Attributes:
        presets: those that are judged.
        band: allowed on top of an error budget: a value that the unpatched model happens to hit exactly.
        jump: where one rounding moves the unpatched model by more than this (a top-k that picks other
            queries, a code book's nearest entry), nothing can be judged; a wrong fold is off by 1e-1, and
            a gradient that lacks a part, or has one twice, by about 1.
        shift: an activation's input is off by about this: values as near to a step may take the other side.
        device: where the model runs; it is built on the CPU.
    """

    name: str
    presets: tuple[str, ...]
    band: float
    jump: float
    shift: float
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    device: str = "cpu"

    @property
    def eps(self) -> float:
        return torch.finfo(self.autocast or self.weights).eps

    @property
    def is_low(self) -> bool:
        return self.eps > torch.finfo(torch.float32).eps

    @property
    def tells_all(self) -> bool:
        """Whether the whole page is made of it: plans, reloaded checkpoints, and why sites are left alone."""
        return self.name == "float32"


FLOAT32 = Precision(
    "float32",
    ("paper", "exact", "auto"),
    band=8 * torch.finfo(torch.float32).eps,
    jump=1e-2,
    shift=4e-6,
)
# `paper` folds weights, which must happen in float32; a band of one rounding
BF16 = Precision("bf16", ("exact", "auto"), 2**-8, 0.2, 1e-2, weights=torch.bfloat16)
AUTOCAST = Precision("autocast", ("exact", "auto"), 2**-8, 0.2, 1e-2, autocast=torch.bfloat16)
GPU_FLOAT32 = dataclasses.replace(
    FLOAT32, name="gpu-float32", presets=("exact", "auto"), device="cuda"
)
GPU_BF16 = dataclasses.replace(BF16, name="gpu-bf16", device="cuda")
PRECISIONS = {
    precision.name: precision for precision in (FLOAT32, BF16, AUTOCAST, GPU_FLOAT32, GPU_BF16)
}


def in_precision(built: Built, precision: Precision) -> Built:
    """The model and the inputs as a user of this precision has them."""
    model, inputs = built.model, built.inputs
    if precision.weights != torch.float32:
        inputs = inputs.map(lambda t: t.to(precision.weights) if t.is_floating_point() else t)
        model = in_dtype(copy.deepcopy(model), precision.weights)
    if precision.device != "cpu":
        inputs = inputs.map(lambda t: t.to(precision.device))
        model = copy.deepcopy(model).to(precision.device)
    return dataclasses.replace(built, model=model, inputs=inputs)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """Cast in place what transformers casts: neither rotary frequencies nor what a class keeps in float32."""
    kept = _kept_in_float32(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_floating_point() and "inv_freq" not in name and not kept.search(name):
            tensor.data = tensor.data.to(dtype)
    return model


def _kept_in_float32(model: nn.Module) -> re.Pattern[str]:
    """Of the names of parameters that some class of the model keeps, in float16 at least."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
        names |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(rf"(?:^|\.){name}(?:\.|$)" for name in sorted(names)) or "(?!)")
