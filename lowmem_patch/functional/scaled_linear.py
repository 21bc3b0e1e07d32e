"""Products times a scale that trains, of which no product is saved for the scale.

Torch saves y for the gradient of s in z = s y. Of a Linear (LayerScale, gates) that of the weight gives it:

    y = x W^T + b,    z = s y,    G = dz^T x,    g = sum dz
    d_s = rowsum(G * W) + g b,    d_W = s G,     d_b = s g,     d_x = (s dz) W

s is one number for each of the outputs, or one for all: then d_s is the sum of these. x is saved, which the
weight's gradient needs anyway, or what it is computed from. G is as large as dz where s is tiny: float16 has
no room for it, which the caller sees to.

Cosine attention (Swin V2, XCiT) multiplies its scores, as many as softmax has, with a scale for each head.
Here the factors give its gradient, since sum(dz * a b) = sum(a * dz b^T); they are saved for their own:

    y = a b,    z = s y,    G = dz b^T,    d_s = sum(a * G),    d_a = s G,    d_b = s a^T dz
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.constants import wide
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import dispatched, resolve
from lowmem_patch.reference import cast


class _ScaledLinear(_library.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        scale: Tensor,
        x: Tensor,
        again: Callable[..., Tensor] | None,
        weight: Tensor,
        bias: Tensor | None,
        channel: int,
        *sources: Tensor,
    ) -> Tensor:
        _library.see_undefined(ctx)
        ctx.save_for_backward(scale, weight, bias, *((x,) if again is None else sources))
        ctx.again, ctx.channel, ctx.number = again, channel, len(sources)
        ctx.dtypes = (x.dtype, y.dtype)
        return y * scale

    @staticmethod
    @_library.first_order("scaled_linear")
    def backward(ctx: Any, dz: Tensor) -> Any:
        scale, weight, bias, *sources = ctx.saved_tensors
        _, for_scale, for_x, _, for_weight, for_bias, *_ = ctx.needs_input_grad
        x_dtype, dtype = ctx.dtypes
        dz = dz if ctx.channel == -1 else dz.movedim(ctx.channel, -1)
        rows, factors = dz.reshape(-1, dz.shape[-1]), scale.reshape(-1)
        d_scale = d_x = d_weight = d_bias = None
        with _library.without_autocast(dz.device.type):
            # as the Linear multiplied: y, and with it the row sums, are of these
            weight_dtype, bias_dtype = weight.dtype, None if bias is None else bias.dtype
            weight, bias = cast(weight, dtype), None if bias is None else cast(bias, dtype)
            if for_x:
                d_x = cast((rows * factors).to(dtype).mm(weight), x_dtype)
                d_x = d_x.view(*dz.shape[:-1], weight.shape[1])
            x = (sources[0] if ctx.again is None else ctx.again(*sources)).to(dtype)
            # in both sums, which cancel where the bias takes an offset away
            low = cast(rows, dtype)
            products = _wide_product(low.t(), x.reshape(-1, x.shape[-1]))
            sums = None if bias is None else low.sum(0, dtype=wide(low.dtype))
            if for_scale or for_weight:
                chosen = resolve("auto", products, weight, factors)
                wanted = weight_dtype if for_weight else None
                each, d_weight = _gradients(products, weight, factors, wanted, chosen)
            if for_scale:
                d_scale = _scale_gradient(each, sums, bias, scale)
            if for_bias and sums is not None:
                d_bias = (sums * factors).to(bias_dtype)
        d_weight = d_weight if for_weight else None  # of an operator, what is absent is empty
        return None, d_scale, d_x, None, d_weight, d_bias, None, *(None,) * ctx.number


def _scale_gradient(
    each: Tensor, sums: Tensor | None, bias: Tensor | None, scale: Tensor
) -> Tensor:
    """From the row sums of G * W, and from g."""
    each = each if sums is None or bias is None else each + sums * bias
    total = each if scale.numel() > 1 else each.sum()
    return total.to(scale.dtype).view(scale.shape)


_gradients = _library.Operator(
    "scaled_gradients(Tensor products, Tensor weight, Tensor factors, ScalarType? dtype, "
    "str implementation) -> (Tensor, Tensor)",
    dispatched("scaled_gradients"),
    lambda products, weight, factors, dtype, implementation: (
        products.new_empty(products.shape[0]),
        None if dtype is None else products.new_empty(products.shape, dtype=dtype),
    ),
)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in float32 at least: the row sums of G * W may cancel, in which its rounding to bf16
    would stay. A graph and a predicted step round it and cast it."""
    dtype = wide(left.dtype)
    if left.dtype == dtype or not _library.is_eager(left, right):
        return left.mm(right).to(dtype)
    if left.is_cuda and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype).mm(right.to(dtype))


def scaled_linear(
    y: Tensor,
    scale: Tensor,
    x: Tensor,
    again: Callable[..., Tensor] | None,
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    channel: int = -1,
) -> Tensor:
    """``y * scale`` of a Linear's output, that saves x, or its ``sources``, and not y.

    Args:
        y: ``F.linear(x, weight, bias)``, detached, its last dimension O moved to ``channel``.
        scale: of O elements, or of one, in a shape that multiplies y so.
        x: ``[..., F]``; its gradient flows to the node that computed it.
        again: gives x from the sources; None: x itself is saved.
        sources: no gradient flows to them from here.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        channel: the dimension of y that the scale's elements are of.

    Returns:
        as torch multiplies both.
    """
    return _ScaledLinear.apply(y, scale, x, again, weight, bias, channel, *sources)


class _ScaledScores(_library.Function):
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
                if for_scale:
                    each = (products.to(wide(a.dtype)) * a).sum((-2, -1), keepdim=True)
                    aligned = [1] * (each.dim() - scale.dim()) + list(scale.shape)
                    d_scale = each.sum_to_size(aligned).view(scale.shape).to(scale.dtype)
                d_a = (products * scale).to(a.dtype) if for_a else None
            if for_b:
                d_b = (a.mT @ low * scale).to(b.dtype)
        return None, d_scale, d_a, d_b


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
    return _ScaledScores.apply(y, scale, a, b)
