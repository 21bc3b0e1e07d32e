"""Products of two batches of rows times a scale that trains, of which no product is saved.

Cosine attention (Swin V2, XCiT) multiplies its scores with a scale for each head. Torch saves the scores,
as many as softmax has, for the gradient of the scale. Here the factors give it:

    y = a b,    z = s y,    G = dz b^T,    d_s = sum(a * G),    d_a = s G,    d_b = s a^T dz

since sum(dz * a b) = sum(a * dz b^T). a and b are saved, which their own gradients need anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library


class _ScaledScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
        _library.see_undefined(ctx)
        ctx.save_for_backward(scale, a, b)
        return y * scale

    @staticmethod
    @_library.first_order("scaled_scores")
    def backward(ctx: Any, dz: Tensor) -> Any:
        scale, a, b = ctx.saved_tensors
        _, for_scale, for_a, for_b = ctx.needs_input_grad
        d_scale = d_a = d_b = None
        with _library.without_autocast(dz.device.type):
            low = dz.to(a.dtype)
            if for_scale or for_a:
                products = low @ b.mT
                wide = torch.promote_types(a.dtype, torch.float32)
                if for_scale:
                    each = (products.to(wide) * a).sum((-2, -1), keepdim=True)
                    d_scale = each.sum_to_size(_aligned(scale, each)).view(scale.shape)
                    d_scale = d_scale.to(scale.dtype)
                d_a = (products * scale).to(a.dtype) if for_a else None
            if for_b:
                d_b = (a.mT @ low * scale).to(b.dtype)
        return None, d_scale, d_a, d_b


def _aligned(scale: Tensor, each: Tensor) -> list[int]:
    """The shape of a scale with as many dimensions as what it multiplies."""
    return [1] * (each.dim() - scale.dim()) + list(scale.shape)


def scaled_scores(y: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``y * scale`` of a product y of two tensors, that saves these and not y.

    Args:
        y: ``a @ b``, ``[..., N, M]``, detached, in the dtype of both.
        scale: of one element, or ``[..., 1, 1]`` with leading dimensions that broadcast to those of y.
        a: ``[..., N, D]``.
        b: ``[..., D, M]``, with the leading dimensions of ``a``.

    Returns:
        as torch multiplies both.
    """
    apply: Any = _ScaledScores.apply
    z: Tensor = apply(y, scale, a, b)
    return z
