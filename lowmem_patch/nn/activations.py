"""Activations and dropouts that keep nothing that is not kept anyway, or a few bits for each element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import (
    ActivationKind,
    activation,
    codes_activation,
    in_compiler,
    packed_dropout,
)
from lowmem_patch.nn.context import is_foreign, needs_gradient, one_tensor
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_ops import Activation, Saved
from lowmem_patch.nn.modes import without_function_modes


def in_autocast_dtype(x: Tensor, kind: ActivationKind) -> Tensor:
    """``x`` as autocast gives it to the activation: of all kinds, a GPU computes softplus in float32."""
    low = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if low and kind == "softplus" and torch.is_autocast_enabled("cuda") else x


class CodesActivation(nn.Module):
    """`codes_activation` as a module: exact forward, step-function derivative (arXiv 2406.16282); in eval or
    without gradients, the plain function.

    Args:
        kind: which activation.
        bits: of each code, 1 to 4.
        in_place: the result overwrites the input, for whoever reads that; autograd keeps no copy of it.
    """

    def __init__(self, kind: ActivationKind, bits: int = 2, in_place: bool = False) -> None:
        super().__init__()
        self.kind: ActivationKind = kind
        self.bits = bits
        self.in_place = in_place

    def forward(self, x: Any = None, *others: Any, **named: Any) -> Tensor:
        if x is None or others or named:
            x = one_tensor(self, x, others, named)
        x = in_autocast_dtype(value_of(x), self.kind)
        y = codes_activation(x, self.kind, self.bits)
        return x.copy_(y) if self.in_place else y

    def extra_repr(self) -> str:
        return f"strategy=codes, kind={self.kind}, bits={STEP_TABLES[self.kind][self.bits].bits}"


class RecomputedActivation(nn.Module):
    """Its value is never saved: where a gradient is wanted, it returns a `lowmem_patch.nn.deferred.Deferred`
    tensor, which readers compute again in backward, exactly; else ``act(x)``.

    Attributes:
        saves_until_read: its reader may save something else in the place of what it saves: who counts
            saved bytes asks.
    """

    saves_until_read = True

    def __init__(self, op: Activation, in_place: bool = False) -> None:
        super().__init__()
        self.kind: ActivationKind = op.kind
        self.op = op
        self.in_place = in_place

    def forward(self, x: Any = None, *others: Any, **named: Any) -> Tensor:
        """Elementwise, any shape; dtype of ``x``."""
        if x is None or others or named:
            x = one_tensor(self, x, others, named)
        if isinstance(x, Deferred) and self.kind != "softplus":  # which autocast casts
            with without_function_modes():
                made: Tensor = x.op.activated(x, self.kind, self.op.reads, self.in_place)
            if made is not NotImplemented:
                return made
        x = in_autocast_dtype(value_of(x), self.kind)
        if needs_gradient(x) and not is_foreign(x):
            return self.op.of((x,))
        return activation(x, self.kind)

    def extra_repr(self) -> str:
        return f"{self.kind}, recompute"


class PackedDropout(nn.Dropout):
    """`torch.nn.Dropout`, from the same random numbers, that keeps one bit for each element.

    Out of training, without a gradient, in place, on tensors of other classes (DTensor), under torch.func and
    under torch.compile it is the plain one; so it is for a deferred input, which decides what is kept.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise, any shape; dtype of ``input``."""
        if (
            isinstance(input, Deferred)
            or self.inplace
            or not (self.training and 0 < self.p < 1 and input.numel() and needs_gradient(input))
            or in_compiler()
            or is_foreign(input)
        ):
            return super().forward(input)
        return packed_dropout(input, self.p)[0]


def keep_for_dropout(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Forward hook of a Linear: ``F.dropout`` of its output keeps one bit for each element."""
    if in_compiler() or not module.training or is_foreign(output) or not needs_gradient(output):
        return None
    return Saved().of(output)
