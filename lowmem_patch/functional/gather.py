"""``tensor.gather(dim, index)`` that saves the index alone.

Torch saves the tensor as well, of which its backward reads the shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowmem_patch.functional import _library


class _Gather(_library.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, index: Tensor) -> Tensor:
        _library.see_undefined(ctx)
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = tensor.shape, dim
        return tensor.gather(dim, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return None, None, None
        # of torch's own ops, so that it can be differentiated again
        (index,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).scatter_add(ctx.dim, index, dy), None, None


def gather(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """``tensor.gather(dim, index)``, which does not save the tensor. It can be differentiated any number of
    times."""
    return _Gather.apply(tensor, dim, index)
