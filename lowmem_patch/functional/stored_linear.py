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
from lowmem_patch.functional.products import product


class _StoredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _library.see_undefined(ctx)
        needs_input, needs_weight, _ = ctx.needs_input_grad
        parts: tuple[Tensor | None, Tensor | None] = None, None
        if needs_weight:
            memory = Memory.of(x)
            parts = memory.parts(x)
            memory.saved()
        ctx.save_for_backward(*parts, weight if needs_input else None)
        with _library.without_autocast(x.device.type):
            return product(x, weight, bias)

    @staticmethod
    @_library.first_order("eight_bit_storage")
    def backward(ctx: Any, dy: Tensor) -> Any:
        integers, scales, weight = ctx.saved_tensors
        d_x = d_weight = None
        rows = dy.reshape(-1, dy.shape[-1])
        with _library.without_autocast(dy.device.type):
            # first: torch's sum takes a multiple of dy for a while, and nothing else is there yet
            d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
            if weight is not None:
                d_x = rows.mm(weight).view(*dy.shape[:-1], weight.shape[1])
            if integers is not None:
                x = integers.memory.read(integers, scales)
                d_weight = rows.t().mm(x.view(rows.shape[0], -1))
        return d_x, d_weight, d_bias


_call = _library.direct_call(_StoredLinear)


def stores_directly(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the op can store ``x``, which nobody packs: all are ordinary tensors, which no mode watches."""
    if packs_saved_tensors() or not _library.is_eager(x, weight, bias):
        return False
    if torch.is_inference_mode_enabled() or x.is_inference() or x.is_meta or x.is_nested:
        return False
    strided = x.layout is torch.strided and x.dtype in EIGHT_BIT_DTYPES
    return strided and x.numel() > 0 and weight.numel() > 0 and is_whole(x)


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
    if weight.dtype != compute_dtype:
        weight = weight.to(compute_dtype)
    if bias is not None and bias.dtype != compute_dtype:
        bias = bias.to(compute_dtype)
    y: Tensor = _call(x, weight, bias)
    return y
