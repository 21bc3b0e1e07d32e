"""The ops behind what experts read and give: gathered rows of a tensor, and products with a weight each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import (
    ExpertWeight,
    RecomputedMatmul,
    RowBias,
    in_compiler,
    recomputed_linear,
)
from lowmem_patch.nn.deferred import Deferred, Unstored, value_of
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.nn.stored import attach, keep


def _gathered(tensor: Tensor, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor[index].to(dtype or tensor.dtype)


class GatheredRows(Op):
    """``tensor[index]``: matmuls of trained weights save the tensor and the index, and gather again.

    The sources are both. A product to which it is added does so as well. All gradients pass through it.
    """

    may_be_bypassed = False

    @classmethod
    def of(cls, tensor: Tensor, index: Tensor) -> Deferred:
        return keep(tensor[index], cls(), (tensor, index))

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        if to.adapter is not None or not to.weight.requires_grad:
            return super().linear(h, to, dtype)
        return recomputed_linear(h.plain(), _gathered, h.sources, to.weight, to.bias, dtype)

    def grouped(
        self, h: Deferred, func: Callable[..., Any], weight: ExpertWeight, offsets: Tensor | None
    ) -> Any:
        if not weight.trains:
            return NotImplemented
        return Product.of(RecomputedMatmul(func, _gathered, h.plain(), weight, offsets, h.sources))


class Product(Op):
    """The product of such a matmul; where each row of it is multiplied with a number, it is not saved.

    The sources are what the product is made of, until it is multiplied. A bias of gathered rows that is added
    in place is the last three of them.

    Args:
        matmul: that makes it; its tensors are the sources.
    """

    biased = False

    def __init__(self, matmul: RecomputedMatmul) -> None:
        self.multiply, self.again, self.offsets = matmul.multiply, matmul.again, matmul.offsets
        self.adapted, self.scale = matmul.weight.left is not None, matmul.weight.scale

    @classmethod
    def of(cls, matmul: RecomputedMatmul) -> Deferred:
        weights = [tensor for tensor in matmul.weight[:3] if tensor is not None]
        sources = (matmul.x, *weights, *matmul.sources)
        if in_compiler():
            return keep(matmul.product(), cls(matmul), sources)
        return attach(matmul.product(), cls(matmul), sources, watched=True)

    def was_used(self, h: Any) -> None:
        # not by a routing weight: whoever saves the product, or a part of it, need not hold x as well
        h.sources, h._versions = (), None

    def added(self, h: Deferred, other: Any) -> Any:
        gathered = isinstance(other, Deferred) and isinstance(other.op, GatheredRows)
        if not gathered or other.is_changed() or not h.sources or self.biased:
            return NotImplemented
        if other.shape != h.shape or other.dtype != h.dtype:
            return NotImplemented
        rows = other.plain()
        h.add_(rows)
        self.biased = True
        h.sources = (*h.sources, rows, *other.sources)
        _take_write(h)
        return h

    def times(self, h: Deferred, other: Any) -> Any:
        weighs = isinstance(other, Tensor) and other.requires_grad and other.is_floating_point()
        if not weighs or not h.sources or other.shape != (*h.shape[:-1], 1):
            return NotImplemented
        x, weight, *rest = h.sources
        left = rest.pop(0) if self.adapted else None
        right = rest.pop(0) if self.adapted else None
        bias = None
        if self.biased:
            *rest, rows, table, numbers = rest
            bias = RowBias(rows, table, numbers)
        self.was_used(h)  # the caller may hold the product for longer
        h.was_bypassed = True
        whole = ExpertWeight(weight, left, right, self.scale)
        matmul = RecomputedMatmul(self.multiply, self.again, x, whole, self.offsets, tuple(rest))
        return matmul.weighted(h.detached(), value_of(other), bias)


def _take_write(h: Deferred) -> None:
    """The write that was just made is the op's: it and the sources say what the values are now."""
    h._first_version, h._versions = h._version, [source._version for source in h.sources]
    if isinstance(h, Unstored) and h._value is not None:
        h._value_version = h._value._version
