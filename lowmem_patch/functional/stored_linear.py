"""A Linear that saves its input in 8 bits.

    y = x W^T + b,    d_x = dy W,    d_W = dy^T x~,    d_b = sum dy

x~ is what 8 bits tell of x (`lowmem_patch.functional.eight_bit`). Forward and d_x are those of F.linear.
Hooks on saved tensors would save the same, and take more of the host's time: this is for where nobody packs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library
from lowmem_patch.functional._ownership import packs_saved_tensors
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES, Memory, is_whole
from lowmem_patch.functional.products import IDENTITY, linear_forward
from lowmem_patch.functional.products_backward import linear_backward, one_for_each
from lowmem_patch.reference import cast


class _StoredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        ctx.dtypes = x.dtype, None, weight.dtype, None if bias is None else bias.dtype, None, None
        weight = cast(weight, dtype)
        parts: tuple[Tensor | None, Tensor | None] = None, None
        if needs_weight:
            memory = Memory.of(x)
            parts = memory.parts(x)
            memory.saved()
        ctx.save_for_backward(*parts, weight if needs_input else None)
        ctx.needs, ctx.shape = (needs_input, needs_weight, needs_bias, False, False), x.shape
        return linear_forward(x, weight, bias, None, None, 1.0, dtype)[0]

    @staticmethod
    @_library.first_order("eight_bit_storage")
    def backward(ctx: Any, dy: Tensor) -> Any:
        integers, scales, weight = ctx.saved_tensors
        x = None if integers is None else integers.memory.read(integers, scales).view(ctx.shape)
        products = (weight, None, None, None, 1.0, IDENTITY)
        found = linear_backward(dy, x, None, *products, ctx.needs, "reference")
        needs = (ctx.needs[0], False, *ctx.needs[1:])
        d_x, _, d_weight, d_bias, *_ = one_for_each(found, needs, ctx.dtypes)
        return d_x, d_weight, d_bias, None


_call = _library.direct_call(_StoredLinear)


def stores_directly(x: Any, *others: Any) -> bool:
    """Whether an op can store ``x``, which nobody packs, in 8 bits by itself: all are ordinary tensors, or
    None, that no mode watches."""
    if packs_saved_tensors() or not _library.is_eager(x, *others):
        return False
    return x.dtype in EIGHT_BIT_DTYPES and x.numel() > 0 and is_whole(x)


def stored_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype
) -> Tensor:
    """F.linear that saves ``x``, of which `stores_directly` is true, in 8 bits.

    Nothing is checked: that would cost as much as a small kernel.

    Args:
        x: ``[..., F]`` in ``compute_dtype``.
        weight: ``[O, F]``, which is cast to ``compute_dtype``, and saved so, as autocast does.
        bias: ``[O]`` or None.
        compute_dtype: of the product.

    Returns:
        ``[..., O]`` in ``compute_dtype``, bit for bit that of F.linear.
    """
    y: Tensor = _call(x, weight, bias, compute_dtype)
    return y
