"""Dropout whose mask is saved in one bit for each element, and a Linear behind it that saves no input.

Torch saves a bool for each element (on the CPU a number of the tensor's dtype), and a Linear behind the
dropout saves what is left. Here the numbers are drawn as torch draws them, the mask is packed, and the
Linear recomputes its input for the weight's gradient:

    value = x m s,    dx = dy m s        with m the mask and s = 1 / (1 - p).    Saved: m, in bits
    y = value W^T + b,    d_value = dy W,    d_W = dy^T value.                   Saved: x, m, W
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import ActivationKind, wide
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import dispatched, module, resolve
from lowmem_patch.functional.activations import computed_again
from lowmem_patch.functional.recomputed import recomputed_linear

_pack = _library.Operator(
    "pack_bool(Tensor mask, str implementation) -> Tensor",
    dispatched("pack_bool"),
    lambda mask, implementation: mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8),
)


@cache
def _scale(p: float, dtype: torch.dtype, fused: bool, gradient: bool) -> float:
    """What torch multiplies the elements that stay with, to the last bit.

    On the CPU that is 1 / (1 - p) in the tensor's dtype. Its fused CUDA kernel has it in float32
    (float64), and forward divides by 1 - p rounded to that.
    """
    if not fused:
        return float(torch.ones((), dtype=dtype, device="cpu").div_(1 - p))
    arithmetic = wide(dtype)
    stays = 1 - p if gradient else float(torch.tensor(1 - p, dtype=arithmetic, device="cpu"))
    return float(torch.tensor(1 / stays, dtype=arithmetic, device="cpu"))


def _drop(
    x: Tensor,
    bits: Tensor,
    p: float,
    gradient: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    scale = _scale(p, dtype, x.is_cuda, gradient)
    y: Tensor = module(implementation).drop(x, bits, scale, dtype, out_dtype)
    return y


_drop_bits = _library.Operator(
    "drop(Tensor x, Tensor bits, float p, bool gradient, ScalarType dtype, ScalarType out_dtype, "
    "str implementation) -> Tensor",
    _drop,
    lambda x, bits, p, gradient, dtype, out_dtype, implementation: x.new_empty(
        x.shape, dtype=out_dtype
    ),
)


def _draw(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The dropout's value and its mask, from the random numbers that ``F.dropout(x, p)`` would take."""
    if x.is_cuda:
        value, mask = torch.native_dropout(x, p, True)  # what F.dropout calls there
    else:
        noise = F.dropout(torch.ones_like(x), p)
        value, mask = x * noise, noise != 0
    return value, _pack(mask, resolve("auto", mask))


class _PackedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        value, bits = _draw(x, p)
        ctx.save_for_backward(bits)
        ctx.mark_non_differentiable(bits)
        ctx.set_materialize_grads(False)
        ctx.p, ctx.dtype = p, x.dtype
        return value, bits

    @staticmethod
    @_library.first_order("packed_dropout")
    def backward(ctx: Any, dy: Tensor, _: None) -> Any:
        (bits,) = ctx.saved_tensors
        settings = (ctx.p, True, ctx.dtype, ctx.dtype, resolve("auto", dy))
        return _drop_bits(dy, bits, *settings), None


_apply = _library.direct_call(_PackedDropout)


def packed_dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """What ``F.dropout(x, p)`` gives in training, from the same random numbers; saves its mask in bits.

    Args:
        x: ``[...]``, floating point, n elements, at least one.
        p: above 0 and below 1.

    Returns:
        the value, like ``x``; the mask, ``[ceil(n / 8)]`` uint8, eight flags a byte, the first one lowest,
        without a gradient.
    """
    y, bits = _apply(x, p)
    return y, bits


def _input_again(
    *sources: Tensor,
    p: float,
    kind: ActivationKind | None,
    value_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """The dropout's result in ``dtype``, from what its input is computed from, and the mask."""
    x, *more, bits = sources
    if kind is not None:
        x = computed_again(x, *more, kind=kind)
    value: Tensor = _drop_bits(x, bits, p, False, value_dtype, dtype, resolve("auto", x))
    return value


def dropout_linear(
    value: Tensor,
    sources: tuple[Tensor, ...],
    bits: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float,
    kind: ActivationKind | None,
    compute_dtype: torch.dtype,
) -> Tensor:
    """F.linear(value, weight, bias) behind a dropout, that saves ``sources`` and ``bits``, not ``value``.

    The gradient of ``sources`` does not pass through this op: it flows through the node that
    computed ``value``.

    Args:
        value: ``[..., F]``, the dropout's result.
        sources: what the dropout's input is computed from: itself (any floating dtype, cast to that of
            ``value``), x of h(x), or gate and up of h(gate) * up.
        bits: what `packed_dropout` gave beside ``value``.
        p: its probability.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        kind: which activation; None where the source is the dropout's input itself.
        compute_dtype: value, weight and bias are cast to it; the casts are repeated in backward.

    Returns:
        ``[..., O]`` in ``compute_dtype``.

    Raises:
        ValueError: shapes do not fit.
    """
    if weight.dim() != 2 or weight.shape[1] != value.shape[-1]:
        raise ValueError(
            f"dropout_linear: weight must be [O, F] for value [..., F], got {tuple(weight.shape)} "
            f"for {tuple(value.shape)}"
        )
    again = partial(_input_again, p=p, kind=kind, value_dtype=value.dtype)
    return recomputed_linear(value, again, (*sources, bits), weight, bias, compute_dtype)
