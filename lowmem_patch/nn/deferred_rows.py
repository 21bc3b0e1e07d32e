"""The ops behind what experts read and give: gathered rows of a tensor, and products with a weight each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import RecomputedMatmul, recomputed_linear
from lowmem_patch.nn.deferred import Deferred, keep, value_of
from lowmem_patch.nn.op import Op, Projection


def _gathered(tensor: Tensor, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor[index].to(dtype or tensor.dtype)


class GatheredRows(Op):
    """``tensor[index]``: matmuls of trained weights save the tensor and the index, and gather again.

    The sources are both. All gradients pass through it.
    """

    bypassed = False

    @classmethod
    def of(cls, tensor: Tensor, index: Tensor) -> Deferred:
        return keep(tensor[index], cls(), (tensor, index))

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        if to.adapter is not None or not to.weight.requires_grad:
            return super().linear(h, to, dtype)
        return recomputed_linear(h.plain(), _gathered, h.sources, to.weight, to.bias, dtype)

    def grouped(
        self, h: Deferred, func: Callable[..., Any], weight: Tensor, offsets: Tensor | None
    ) -> Any:
        if weight.dim() != 3 or not weight.requires_grad:
            return NotImplemented
        return Product.of(RecomputedMatmul(func, _gathered, h.plain(), weight, offsets, h.sources))


class Product(Op):
    """The product of such a matmul; where each row of it is multiplied with a number, it is not saved.

    The sources are what the product is made of, until it is multiplied.

    Args:
        multiply, again, offsets: as of `RecomputedMatmul`.
    """

    bypassed = False  # all gradients pass through it

    def __init__(
        self,
        multiply: Callable[..., Tensor],
        again: Callable[..., Tensor],
        offsets: Tensor | None,
    ) -> None:
        super().__init__()
        self.multiply, self.again, self.offsets = multiply, again, offsets

    @classmethod
    def of(cls, matmul: RecomputedMatmul) -> Deferred:
        multiply, again, x, weight, offsets, sources = matmul
        op = cls(multiply, again, offsets)
        return keep(matmul.product(), op, (x, weight, *sources), owned=True)

    def times(self, h: Deferred, other: Any) -> Any:
        weighs = isinstance(other, Tensor) and other.requires_grad and other.is_floating_point()
        if not weighs or not h.sources or other.shape != (*h.shape[:-1], 1):
            return NotImplemented
        x, weight, *sources = h.sources
        h.sources = ()  # the caller may hold the product for longer, which need not hold x
        h._bypassed = True
        matmul = RecomputedMatmul(
            self.multiply, self.again, x, weight, self.offsets, tuple(sources)
        )
        return matmul.weighted(h.detached(), value_of(other))
