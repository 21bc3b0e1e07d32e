"""A batched matmul that keeps its wide left operand and no narrow copy of it.

Under autocast, softmax gives float32 and keeps that for its own backward; the matmul behind it casts it
to bf16 and keeps this copy, too. Here the cast is repeated in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library

__all__ = ["kept_matmul"]


class _KeptMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, dtype: torch.dtype) -> Any:
        with _library.without_autocast(left.device.type):
            # three dimensions and a whole operand, as torch's own matmul multiplies and keeps them
            narrow = right.to(dtype).reshape(-1, *right.shape[-2:])
            y = left.to(dtype).reshape(-1, *left.shape[-2:]).bmm(narrow)
        needs_left, needs_right = ctx.needs_input_grad[:2]
        ctx.save_for_backward(left if needs_right else None, narrow if needs_left else None)
        ctx.shapes, ctx.dtypes = (left.shape, right.shape), (left.dtype, right.dtype)
        # no view, which autograd would not let anybody write into
        return torch.ops.aten._unsafe_view.default(y, (*left.shape[:-1], right.shape[-1]))

    @staticmethod
    @_library.first_order("kept_matmul")
    def backward(ctx: Any, dy: Tensor) -> Any:
        left, narrow = ctx.saved_tensors
        rows = dy.reshape(-1, *dy.shape[-2:])
        d_left = d_right = None
        with _library.without_autocast(dy.device.type):
            if narrow is not None:
                d_left = rows.bmm(narrow.transpose(1, 2)).view(ctx.shapes[0]).to(ctx.dtypes[0])
            if left is not None:
                again = left.to(dy.dtype).reshape(-1, *left.shape[-2:])
                d_right = again.transpose(1, 2).bmm(rows).view(ctx.shapes[1]).to(ctx.dtypes[1])
        return d_left, d_right, None


def kept_matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left.to(dtype) @ right.to(dtype)`` that keeps ``left`` as it is given.

    Args:
        left: ``[..., N, M]``.
        right: ``[..., M, K]``, of the same batch dimensions.
        dtype: of the product and of the result.

    Returns:
        ``[..., N, K]``.

    Raises:
        ValueError: shapes do not fit.
    """
    fits = left.shape[:-2] == right.shape[:-2] and left.shape[-1:] == right.shape[-2:-1]
    if left.dim() < 3 or not fits:
        raise ValueError(
            f"kept_matmul: [..., N, M] and [..., M, K] must share all but the last two dimensions, got "
            f"{tuple(left.shape)} and {tuple(right.shape)}"
        )
    apply: Any = _KeptMatmul.apply
    y: Tensor = apply(left, right, dtype)
    return y
