"""Moves of rows: the parts of a permuted tensor, whose gradients are joined in one pass, and gather.

    q, k, v = qkv.reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)

Torch stacks dq, dk and dv in the order of the permutation, and then copies that to the order of qkv: two
passes, both with their memory out of order. Here they are joined in the order of qkv. Saved: nothing.

Of ``tensor.gather(dim, index)`` torch saves the tensor, of which its backward reads the shape. Here the index
is saved alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library


@lru_cache(maxsize=256)
def _order(shape: Sequence[int], strides: Sequence[int], dim: int) -> tuple[list[int], int, int]:
    """The other dimensions of a part in the order of the memory, and the sizes before and behind ``dim``."""
    memory = sorted(range(len(shape)), key=lambda i: -strides[i])
    place = memory.index(dim)
    order = [i - (i > dim) for i in memory if i != dim]
    return (
        order,
        math.prod(shape[i] for i in memory[:place]),
        math.prod(shape[i] for i in memory[place + 1 :]),
    )


class _UnbindPermuted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, shape: Sequence[int], strides: Sequence[int], dim: int
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.whole, ctx.geometry = whole.shape, (tuple(shape), tuple(strides), dim)
        return whole.as_strided(shape, strides, whole.storage_offset()).unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # of torch's own ops, so that it can be differentiated again
        order, before, behind = _order(*ctx.geometry)
        given = next((g for g in gradients if g is not None), None)
        if given is None:
            return None, None, None, None
        rows = [
            given.new_zeros(before, behind)
            if g is None
            else g.permute(order).reshape(before, behind)
            for g in gradients
        ]
        return torch.cat(rows, 1).view(ctx.whole), None, None, None


_apply = _library.direct_call(_UnbindPermuted)


def unbind_permuted(whole: Tensor, view: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """``view.unbind(dim)``, whose gradient reaches ``whole`` in one pass.

    Args:
        whole: contiguous, of any shape and dtype.
        view: all of its elements, in other dimensions and in another order of them.
        dim: of ``view``.

    Returns:
        ``view.shape[dim]`` views of ``whole``. It can be differentiated any number of times.

    Raises:
        IndexError: ``view`` has no such dimension.
        ValueError: ``whole`` is not contiguous, or ``view`` is no such view of it.
    """
    covers = view.numel() == whole.numel() and view.data_ptr() == whole.data_ptr()
    if not _library.in_compiler():  # 0: no element twice
        covers = covers and torch._debug_has_internal_overlap(view) == 0
    if not covers or not whole.is_contiguous():
        raise ValueError(
            "unbind_permuted: whole must be contiguous, and view show each of its elements, got "
            f"{tuple(view.shape)} for {tuple(whole.shape)}"
        )
    if not -view.dim() <= dim < view.dim():
        raise IndexError(f"unbind_permuted: dimension {dim} of a view of {view.dim()} dimensions")
    dim = dim % view.dim()
    parts: tuple[Tensor, ...] = _apply(whole, view.shape, view.stride(), dim)
    return parts


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
