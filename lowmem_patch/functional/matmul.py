"""A batched matmul that saves its left operand in high precision and no copy of it in low precision.

Under autocast, softmax gives float32 and saves that for its own backward; the matmul behind it casts it
to bf16 and saves this copy, too. Here the cast is repeated in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library


class _RecastMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, dtype: torch.dtype) -> Any:
        with _library.without_autocast(left.device.type):
            # three dimensions and a whole operand, as torch's own matmul multiplies and saves them
            right_cast = right.to(dtype).reshape(-1, *right.shape[-2:])
            y = left.to(dtype).reshape(-1, *left.shape[-2:]).bmm(right_cast)
        needs_left, needs_right = ctx.needs_input_grad[:2]
        ctx.save_for_backward(left if needs_right else None, right_cast if needs_left else None)
        ctx.shapes, ctx.dtypes = (left.shape, right.shape), (left.dtype, right.dtype)
        # no view, which autograd would not let anybody write into
        return torch.ops.aten._unsafe_view.default(y, (*left.shape[:-1], right.shape[-1]))

    @staticmethod
    @_library.first_order("recast_matmul")
    def backward(ctx: Any, dy: Tensor) -> Any:
        left, right_cast = ctx.saved_tensors
        rows = dy.reshape(-1, *dy.shape[-2:])
        d_left = d_right = None
        with _library.without_autocast(dy.device.type):
            if right_cast is not None:
                d_left = rows.bmm(right_cast.transpose(1, 2)).view(ctx.shapes[0]).to(ctx.dtypes[0])
            if left is not None:
                again = left.to(dy.dtype).reshape(-1, *left.shape[-2:])
                d_right = again.transpose(1, 2).bmm(rows).view(ctx.shapes[1]).to(ctx.dtypes[1])
        return d_left, d_right, None


def recast_matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left.to(dtype) @ right.to(dtype)`` that saves ``left`` as it is given.

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
            f"recast_matmul: [..., N, M] and [..., M, K] must share all but the last two dimensions, got "
            f"{tuple(left.shape)} and {tuple(right.shape)}"
        )
    apply: Any = _RecastMatmul.apply
    y: Tensor = apply(left, right, dtype)
    return y
