"""Casts that wait: a deferred tensor in another floating dtype, and an adapter's path in low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import in_compiler, recast_linear
from lowmem_patch.nn.deferred import Deferred, Unstored, defer, value_of
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.nn.stored import keep


class _WaitingCast(Op):
    """A cast of the one source to the dtype ``to``."""

    saves = False

    def __init__(self, to: torch.dtype) -> None:
        self.to = to

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.to

    def compute(self, *sources: Tensor) -> Tensor:
        return sources[0].to(self.to)

    def was_computed(self, sources: tuple[Tensor, ...]) -> None:
        source = sources[0]
        if isinstance(source, Unstored):
            source.op.was_read(source)

    def was_read(self, h: Any) -> None:
        h.let_go()

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        return (dy,)  # autograd casts a gradient to the dtype of what it belongs to


class Cast(_WaitingCast):
    """A deferred tensor in another floating dtype.

    Args:
        to: that dtype.
        low_precision: an adapter casts for weights of its own: its Linears compute in the dtype from before
            the cast, as they would under autocast (adapters with float32 weights on a bf16 model).
    """

    def __init__(self, to: torch.dtype, low_precision: bool) -> None:
        super().__init__(to)
        self.low_precision = low_precision

    @classmethod
    def of(cls, h: Deferred, dtype: torch.dtype, low_precision: bool) -> Deferred:
        op = cls(dtype, low_precision)
        if in_compiler():
            return keep(h.plain().to(dtype), op, (h,))
        return defer(op, (h,))

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        source: Any = h.sources[0]
        moved = source.op.moved(source, move)
        if not isinstance(moved, Deferred):
            return NotImplemented
        return Cast.of(moved, self.to, self.low_precision)

    def dropped(self, h: Deferred, p: float) -> Any:
        source: Any = h.sources[0]
        if isinstance(source.op, Cast):
            return NotImplemented  # the rounding between the casts would be lost
        if not self.low_precision or source.dtype.itemsize >= self.to.itemsize:
            return source.op.dropped(h, p)
        low = source.op.dropped(source, p)
        if low is NotImplemented:
            low = F.dropout(source.plain(), p)
        if not isinstance(low, Deferred):
            return in_low_precision(low, self.to)
        return Cast.of(low, self.to, low_precision=True)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        source: Any = h.sources[0]
        low = source.dtype
        if dtype != self.to and torch.promote_types(low, self.to) != self.to:
            return super().linear(h, to, dtype)  # the product reads what this cast has rounded
        h.was_bypassed = True
        if self.low_precision and dtype == self.to and low.itemsize < dtype.itemsize:
            return in_low_precision(value_of(source.op.linear(source, to, low)), dtype)
        return source.op.linear(source, to, dtype)


class LowPrecision(_WaitingCast):
    """A low-precision tensor where unpatched code holds a high-precision one: an adapter's path in bf16.

    It stays so through Linears, scaling and the addition to a low-precision tensor; anything else gets
    it in the high-precision dtype.
    """

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        h.was_bypassed = True
        return in_low_precision(move(h.sources[0]), self.to)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        h.was_bypassed = True
        tensor = h.sources[0]
        low = tensor.dtype if dtype == self.to else dtype
        y = recast_linear(tensor, to.weight, to.bias, low, to.adapter)
        return in_low_precision(y, dtype) if dtype == self.to else y

    def times(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        h.was_bypassed = True
        return in_low_precision(h.sources[0] * other, self.to)

    def plus(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, Tensor) or other.dtype != h.sources[0].dtype:
            return NotImplemented
        h.was_bypassed = True
        return value_of(other) + h.sources[0]


def in_low_precision(tensor: Tensor, dtype: torch.dtype) -> Deferred:
    """A low-precision tensor that stands for itself in high precision."""
    if in_compiler():
        return keep(tensor.to(dtype), LowPrecision(dtype), (tensor,))
    return defer(LowPrecision(dtype), (tensor,))
