"""The unpatched model with what codes approximate: outputs as before, derivatives of the step tables.

In float64 it is the truth for the gradients of codes, made by none of the code that a patch runs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch import reference
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.nn.modes import CallInstead, run_under
from lowmem_patch.tracing.call_arguments import CalledFunction


class Codes(NamedTuple):
    """The codes of one site: its activation's kind, and their number of bits."""

    kind: Any  # one of `STEP_TABLES`
    bits: int


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Codes, shift: float) -> Tensor:
        ctx.save_for_backward(x + shift)
        ctx.table = STEP_TABLES[codes.kind][codes.bits]
        return reference.activate(x, codes.kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        table = ctx.table
        thresholds = torch.tensor(table.thresholds, dtype=x.dtype, device=x.device)
        both_ends = (*table.levels, table.levels[0])  # a cyclic table uses the first level at both
        levels = torch.tensor(both_ends, dtype=x.dtype, device=x.device)
        return gradient * levels[torch.bucketize(x.contiguous(), thresholds)], None, None


class StepActivation(nn.Module):
    """The exact activation, with the step table's derivative.

    ``shift`` moves the steps: what rounding does to values that lie at one of them. ``in_place``
    overwrites the input, as the original does.
    """

    def __init__(self, codes: Codes, shift: float = 0.0, in_place: bool = False) -> None:
        super().__init__()
        self.codes, self.shift, self.in_place = codes, shift, in_place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _StepFunction.apply(x, self.codes, self.shift)  # type: ignore[no-untyped-call]
        return x.copy_(y) if self.in_place else y


def with_step_derivatives(model: Any, sites: Mapping[str, Codes], shift: float = 0.0) -> Any:
    """``model``, changed: the activations at ``sites`` (names of a report's) have the tables' derivatives."""
    replaced = {}
    for name, codes in sites.items():
        if name.endswith(")"):
            module, function = _called(name)
            stepped = StepActivation(codes, shift)
            run_under(model.get_submodule(module), CallInstead, function, stepped)
            continue
        module = model.get_submodule(name)
        in_place = bool(getattr(module, "inplace", False))
        replaced[id(module)] = StepActivation(codes, shift, in_place)
    for parent in list(model.modules()):
        for slot, child in list(parent._modules.items()):
            if child is not None and id(child) in replaced:
                parent._modules[slot] = replaced[id(child)]
    return model


def _called(site: str) -> tuple[str, CalledFunction]:
    """The module and the function of a site such as ``layers.0.mlp.gelu(approximate='tanh')``."""
    path, bracket, arguments = site.partition("(")
    module, _, name = path.rpartition(".")
    call: Any = ast.parse(f"f{bracket}{arguments}", mode="eval").body
    named = ((str(one.arg), ast.literal_eval(one.value)) for one in call.keywords)
    return module, CalledFunction(name, tuple(map(ast.literal_eval, call.args)), tuple(named))
