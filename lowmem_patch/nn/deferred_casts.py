"""Casts that wait: a deferred tensor in another floating dtype, and an adapter's path in low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import in_compiler, recast_linear
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, Unstored, value_of
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.nn.stored import keep


class _WaitingCast(Op):
    """A cast of the one source to the dtype ``to``."""

    saves = False
    reads = 1

    def __init__(self, to: torch.dtype) -> None:
        self.to = to

    def of(self, source: Tensor) -> Deferred:
        if in_compiler():
            return keep(value_of(source).to(self.to), self, (source,))
        return defer(self, (source,))

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.to

    def compute(self, *sources: Tensor) -> Tensor:
        return sources[0].to(self.to)

    def was_computed(self, sources: tuple[Tensor, ...]) -> None:
        source = sources[0]
        if isinstance(source, Unstored):
            source.op.was_read(source)

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

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        source: Any = h.sources[0]
        moved = source.op.moved(source, move)
        if not isinstance(moved, Deferred):
            return NotImplemented
        return self.of(moved)

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
            return LowPrecision(self.to).of(low)
        return self.of(low)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        source: Any = h.sources[0]
        low = source.dtype
        if dtype != self.to and torch.promote_types(low, self.to) != self.to:
            return super().linear(h, to, dtype)  # the product reads what this cast has rounded
        h.was_bypassed = True
        if self.low_precision and dtype == self.to and low.itemsize < dtype.itemsize:
            return LowPrecision(dtype).of(value_of(source.op.linear(source, to, low)))
        return source.op.linear(source, to, dtype)


class LowPrecision(_WaitingCast):
    """A low-precision tensor where unpatched code holds a high-precision one: an adapter's path in bf16.

    It stays so through Linears, scaling and the addition to a low-precision tensor; anything else gets
    it in the high-precision dtype.
    """

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        h.was_bypassed = True
        return self.of(move(h.sources[0]))

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        h.was_bypassed = True
        tensor = h.sources[0]
        low = tensor.dtype if dtype == self.to else dtype
        y = recast_linear(tensor, to.weight, to.bias, low, to.adapter)
        return self.of(y) if dtype == self.to else y

    def times(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        h.was_bypassed = True
        return self.of(h.sources[0] * other)

    def plus(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, Tensor) or other.dtype != h.sources[0].dtype:
            return NotImplemented
        h.was_bypassed = True
        return value_of(other) + h.sources[0]
