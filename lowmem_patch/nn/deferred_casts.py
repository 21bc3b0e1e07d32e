"""Casts that wait: a deferred tensor in another floating dtype, and an adapter's path in low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import recast_linear
from lowmem_patch.nn.deferred import Deferred, Op, Projection, defer, keep, value_of

__all__ = ["Cast", "Lowered", "lowered"]


class Cast(Op):
    """A deferred tensor in another floating dtype."""

    saves = False

    def __init__(self, to: torch.dtype, lowers: bool) -> None:
        super().__init__(lowers)
        self.to = to

    @classmethod
    def of(cls, h: Deferred, dtype: torch.dtype) -> Deferred:
        op = cls(dtype, h.op.lowers)
        if torch.compiler.is_compiling():
            return keep(h.plain().to(dtype), op, (h,))
        return defer(op, (h,))

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.to

    def compute(self, *sources: Tensor) -> Tensor:
        return sources[0].to(self.to)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        return (dy,)  # autograd casts a gradient to the dtype of what it belongs to

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        source: Any = h.sources[0]
        moved = source.op.moved(source, move)
        return Cast.of(moved, self.to) if isinstance(moved, Deferred) else NotImplemented

    def dropped(self, h: Deferred, p: float) -> Any:
        source: Any = h.sources[0]
        if isinstance(source.op, Cast):
            return NotImplemented  # the rounding between the casts would be lost
        if not self.lowers or source.dtype.itemsize >= self.to.itemsize:
            return source.op.dropped(h, p)
        narrow = source.op.dropped(source, p)
        if narrow is NotImplemented:
            narrow = F.dropout(source.plain(), p)
        return (
            Cast.of(narrow, self.to) if isinstance(narrow, Deferred) else lowered(narrow, self.to)
        )

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        source: Any = h.sources[0]
        h._bypassed = True
        narrow = source.dtype
        if self.lowers and dtype == self.to and narrow.itemsize < dtype.itemsize:
            return lowered(value_of(source.op.linear(source, to, narrow)), dtype)
        return source.op.linear(source, to, dtype)


class Lowered(Op):
    """A narrow tensor where unpatched code holds a wide one: an adapter's path in bf16, as under autocast.

    It stays narrow through Linears, scaling and the addition to a narrow tensor; anything else gets
    it in the wide dtype.
    """

    saves = False

    def __init__(self, to: torch.dtype) -> None:
        super().__init__(lowers=True)
        self.to = to

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.to

    def compute(self, *sources: Tensor) -> Tensor:
        return sources[0].to(self.to)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        return (dy,)

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        h._bypassed = True
        return lowered(move(h.sources[0]), self.to)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        h._bypassed = True
        tensor = h.sources[0]
        narrow = tensor.dtype if dtype == self.to else dtype
        y = recast_linear(tensor, to.weight, to.bias, narrow, to.adapter)
        return lowered(y, dtype) if dtype == self.to else y

    def times(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        h._bypassed = True
        return lowered(h.sources[0] * other, self.to)

    def plus(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, Tensor) or other.dtype != h.sources[0].dtype:
            return NotImplemented
        h._bypassed = True
        return value_of(other) + h.sources[0]


def lowered(tensor: Tensor, dtype: torch.dtype) -> Deferred:
    """A narrow tensor that stands for itself in a wider dtype."""
    if torch.compiler.is_compiling():
        return keep(tensor.to(dtype), Lowered(dtype), (tensor,))
    return defer(Lowered(dtype), (tensor,))
