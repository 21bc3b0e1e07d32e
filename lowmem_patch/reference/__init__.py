"""Every op in eager torch: any device, float64-capable; the oracle of the tests and the fallback.

Functions take and return tensors only: no autograd, no choice of implementation. The module
`lowmem_patch.kernels` has the same functions with the same signatures, and tests compare the two; so these
stand together, and not in the files of the ops, which decide what is saved. Arithmetic is float64 for
float64 tensors and float32 otherwise; each result is rounded once, to its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch import formulas
from lowmem_patch.constants import (
    CODES_PER_GROUP,
    STEP_TABLES,
    ActivationKind,
    EightBits,
    NormSettings,
    padded_rank,
    wide,
)
from lowmem_patch.reference.channel_norms import channel_norm_backward as channel_norm_backward
from lowmem_patch.reference.channel_norms import channel_norm_forward as channel_norm_forward
from lowmem_patch.reference.channel_norms import channel_statistics as channel_statistics
from lowmem_patch.reference.channel_norms import channel_sum_gradient as channel_sum_gradient
from lowmem_patch.reference.cross_entropy import cross_entropy_backward as cross_entropy_backward
from lowmem_patch.reference.cross_entropy import cross_entropy_forward as cross_entropy_forward
from lowmem_patch.reference.cross_entropy import scale_in_place as scale_in_place
from lowmem_patch.reference.eight_bit import from_eight_bits as from_eight_bits
from lowmem_patch.reference.eight_bit import to_eight_bits as to_eight_bits
from lowmem_patch.reference.eight_bit import values_of


def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    """The framework's own activation function."""
    return formulas.FORWARD[kind](x)


def activate_backward(dy: Tensor, x: Tensor, kind: ActivationKind) -> Tensor:
    """dx = dy * h'(x), shape and dtype of ``x``; torch's own formulas."""
    return formulas.BACKWARD[kind](dy.to(x.dtype), x)


def activation_forward(
    x: Tensor, up: Tensor | None, kind: ActivationKind, out_dtype: torch.dtype | None = None
) -> Tensor:
    """h(x), or h(x) * up, which is contiguous, by torch's own; in ``out_dtype`` or the promoted dtype."""
    y = activate(x, kind) if up is None else activate(x, kind) * up
    y = y if out_dtype is None else y.to(out_dtype)
    return y if up is None else y.contiguous()


def activation_backward(
    dy: Tensor,
    x: Tensor | EightBits,
    up: Tensor | EightBits | None,
    kind: ActivationKind,
    hidden: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """dx = dy * h'(x); or d_x = dy * up * h'(x) and d_up = dy * h(x). Contiguous, each in its input's dtype.

    ``hidden`` and ``into``, where given, are overwritten with h(x) or h(x) * up, and with the gradients; they
    may be ``dy``, ``x`` or ``up``.
    """
    x = values_of(x)
    if up is None:
        found = [activate_backward(dy, x, kind)]
    else:
        up = values_of(up)
        dtype = wide(torch.promote_types(x.dtype, up.dtype))
        d_y, gate = dy.to(dtype), x.to(dtype)
        d_gate = activate_backward(d_y * up.to(dtype), gate, kind).to(x.dtype)
        found = [d_gate, (d_y * activate(gate, kind)).to(up.dtype)]
    if hidden is not None:
        hidden.copy_(activation_forward(x, up, kind))
    if into is not None:
        return [place.copy_(gradient) for place, gradient in zip(into, found, strict=True)]
    return [gradient.contiguous() for gradient in found]


def codes_forward(x: Tensor, kind: ActivationKind, bits: int) -> tuple[Tensor, Tensor]:
    """y = h(x) and the code of each element in the step table for ``bits``, which may take fewer.

    The codes of eight elements are one group, first element lowest. With 1, 2 and 4 bits a code, a group is
    one word of 8, 16 or 32 bits. With 3 bits it is one of 24: its lower 16 bits are a word, its higher 8 a
    byte, and all bytes lie behind all words.

    Args:
        x: ``[...]``, n elements.

    Returns:
        y like ``x``, contiguous; codes ``[codes_bytes(n, table.bits)]`` uint8, words in little endian.
    """
    table = STEP_TABLES[kind][bits]
    # float32, because comparing a half tensor with a Python number rounds the number to half
    flat = x.reshape(-1).to(wide(x.dtype))
    codes = torch.zeros_like(flat, dtype=torch.uint8)
    for threshold in table.thresholds:
        codes += flat > threshold
    if table.cyclic:
        codes.masked_fill_(flat >= table.thresholds[-1], 0)
    if kind in ("relu", "relu6"):  # whose backward passes the gradient of a NaN on
        codes.masked_fill_(flat.isnan(), 1)
    codes = F.pad(codes, (0, -flat.numel() % CODES_PER_GROUP))
    return activate(x, kind).contiguous(), _pack(codes, table.bits)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Groups of eight codes, the first one lowest in ``8 * bits`` bits."""
    words = codes.view(-1, CODES_PER_GROUP).int() << _places(bits, codes.device)
    parts = words.sum(1, keepdim=True, dtype=torch.int32).view(torch.uint8)[:, :bits]
    whole = (parts[:, :2], parts[:, 2:]) if bits == 3 else (parts,)
    # a copy: what is saved must not hold the unused bytes of the words
    return torch.cat([part.reshape(-1) for part in whole])


def _unpack(packed: Tensor, bits: int) -> Tensor:
    groups = packed.numel() // bits
    words = packed.new_zeros(groups, 4)
    if bits == 3:
        words[:, :2], words[:, 2] = packed[: 2 * groups].view(-1, 2), packed[2 * groups :]
    else:
        words[:, :bits] = packed.view(-1, bits)
    codes = words.view(torch.int32) >> _places(bits, packed.device) & (1 << bits) - 1
    return codes.view(-1)


def _places(bits: int, device: torch.device) -> Tensor:
    return bits * torch.arange(CODES_PER_GROUP, dtype=torch.int32, device=device)


def codes_backward(
    dy: Tensor, codes: Tensor, kind: ActivationKind, bits: int, dtype: torch.dtype
) -> Tensor:
    """dx = dy * level[code], shape of ``dy``, contiguous, in ``dtype``.

    Exact tables are of activations whose backward selects: 0 where the level is, also of an infinite dy.
    """
    table = STEP_TABLES[kind][bits]
    unpacked = _unpack(codes, table.bits)
    arithmetic = wide(dy.dtype)
    levels = torch.tensor(table.levels, dtype=arithmetic, device=dy.device)
    slopes = levels[unpacked[: dy.numel()]].view(dy.shape)
    dx = dy.contiguous().to(arithmetic) * slopes
    return (dx.masked_fill_(slopes == 0, 0) if table.exact else dx).to(dtype)


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
    z_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y = z gamma + bias over the last dimension, with z and gamma as `NormSettings` says.

    Args:
        x: ``[..., N]``.
        weight: ``[N]`` or None for no factor at all.
        bias: ``[N]`` or None.
        out_dtype, copy_dtype, z_dtype: of y, of a copy of y and of z; None where these are not asked for.

    Returns:
        y ``[..., N]``, contiguous; the copy of y, or None; z like y, or None; rstd ``[...]`` in float32
        (float64 for a float64 x).
    """
    z, rstd = _normalized(x, settings)
    y = affine(z, weight, bias, settings, out_dtype)
    return (
        y,
        None if copy_dtype is None else y.to(copy_dtype),
        None if z_dtype is None else cast(z, z_dtype).contiguous(),
        rstd.squeeze(-1).contiguous(),
    )


def norm_forward_in_eight_bits(
    x: Tensor, *rest: Any
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None, Tensor], tuple[Tensor, Tensor]]:
    """`norm_forward`, and the integers and scales of its z, else of the copy, else of y."""
    y, copy, z, rstd = norm_forward(x, *rest)
    saved = z if z is not None else copy if copy is not None else y
    return (y, copy, z, rstd), to_eight_bits(saved.view(-1))


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y of `norm_forward`, in whatever strides, and rstd ``[..., 1]``."""
    z, rstd = _normalized(x, settings)
    return cast(_affine(z, weight, bias, settings), out_dtype), rstd


def affine(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    dtype: torch.dtype,
) -> Tensor:
    """z gamma + bias over the last dimension, contiguous, in ``dtype``."""
    y = _affine(cast(z, wide(z.dtype)), weight, bias, settings)
    return cast(y, dtype).contiguous()


def _affine(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, settings: NormSettings
) -> Tensor:
    y = z if weight is None else z * settings.gamma_of(cast(weight, z.dtype))
    return y if bias is None else y + cast(bias, z.dtype)


def _normalized(x: Tensor, settings: NormSettings) -> tuple[Tensor, Tensor]:
    """z ``[..., N]`` and rstd ``[..., 1]``, in the dtype of the arithmetic."""
    x = cast(x, wide(x.dtype))
    if settings.centered:
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + settings.eps)
    return x * rstd, rstd


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, but no op where that changes nothing: compiled by torch 2.11, an
    autograd.Function loses the gradient of such an op's result."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def norm_backward(
    dy: Tensor,
    y: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    input_dtype: torch.dtype,
    needs: Sequence[bool],
    normalized: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `norm_forward` from its output, or from z (``normalized``) in the place of y.

    z = (y - bias) / gamma, g = dy gamma:
    dx = rstd (g - mean(g) - z mean(g z)), without mean(g) when not centered;
    d_weight = sum over rows of dy z; d_bias = sum over rows of dy.
    Where gamma is exactly 0, z cannot be recovered and 0 is used in its place.
    Saved: y, rstd, weight, bias; x is not needed.

    Args:
        needs: which of the gradients of x (in ``input_dtype``), weight and bias (in theirs) are asked for.
    """
    needs_input, needs_weight, needs_bias = needs
    dtype, size = rstd.dtype, dy.shape[-1]
    dy = dy.to(dtype)
    dx = d_weight = d_bias = None
    if needs_bias and bias is not None:
        d_bias = dy.reshape(-1, size).sum(0).to(bias.dtype)
    if not (needs_input or needs_weight):
        return dx, d_weight, d_bias
    g, z = dy, y.to(dtype)
    if bias is not None and not normalized:
        z = z - bias.to(dtype)
    if weight is not None:
        gamma = settings.gamma_of(weight.to(dtype))
        if not normalized:
            z = torch.where(gamma == 0, 0.0, z / gamma)
        g = g * gamma
    if needs_input:
        dx = g - z * (g * z).mean(-1, keepdim=True)
        if settings.centered:
            dx = dx - g.mean(-1, keepdim=True)
        dx = (dx * rstd.unsqueeze(-1)).to(input_dtype).contiguous()
    if needs_weight and weight is not None:
        d_weight = (dy * z).reshape(-1, size).sum(0).to(weight.dtype)
    return dx, d_weight, d_bias


def pack_bool(mask: Tensor) -> Tensor:
    """Eight flags a byte, first flag lowest: ``[ceil(n / 8)]`` uint8."""
    return _pack(F.pad(mask.reshape(-1).to(torch.uint8), (0, -mask.numel() % 8)), 1)


def unpack_bool(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool tensor of ``shape`` that `pack_bool` packed."""
    return _unpack(packed, 1)[: prod(shape)].view(*shape).bool()


def drop(
    x: Tensor, bits: Tensor, scale: float, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """x times ``scale`` where the bit is 1 and times 0 elsewhere, contiguous, in ``out_dtype``.

    ``x`` and the product are rounded to ``dtype``, in which torch would have computed.

    Args:
        x: ``[...]``, n elements.
        bits: ``[ceil(n / 8)]`` uint8, from `pack_bool`.
    """
    arithmetic = wide(dtype)
    factor = unpack_bool(bits, x.shape).to(arithmetic) * scale
    return (x.to(dtype).to(arithmetic) * factor).to(dtype).to(out_dtype).contiguous()


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    direction: str,
    strides: Sequence[int] | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The rotary position embedding of one tensor, or its transpose or inverse, which backward needs.

    With the first R columns in halves x1 and x2, cos = (c1, c2) and sin = (s1, s2):
    y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2; transposed y1 = x1 c1 + x2 s2, y2 = x2 c2 - x1 s1; inverse, with
    d = c1 c2 + s1 s2, y1 = (x1 c2 + x2 s1) / d, y2 = (x2 c1 - x1 s2) / d, 0 where all four are 0.

    Args:
        x: ``[B, H, S, D]`` or, with ``heads_dim`` 2, ``[B, S, H, D]``.
        cos, sin: ``[B or 1, S, R]``, R even and at most D.
        heads_dim: 1 or 2.
        direction: ``forward``, ``transposed`` or ``inverse``.
        strides: of the result; None for those of ``torch.empty_like(x)``.
        out_dtype: dtype of the result.
    """
    dtype = wide(x.dtype)
    if strides is None:
        y = torch.empty_like(x, dtype=out_dtype)
    else:
        y = torch.empty_strided(x.shape, strides, dtype=out_dtype, device=x.device)
    size, partial = cos.shape[-1], cos.shape[-1] < x.shape[-1]
    x_turning, y_turning = (x[..., :size], y[..., :size]) if partial else (x, y)
    operand = cast(x_turning, dtype)
    cos, sin = (cast(angles.unsqueeze(heads_dim), dtype) for angles in (cos, sin))
    transposed = direction != "forward"
    if direction == "inverse":
        other_cos, other_sin = (angles.roll(size // 2, -1) for angles in (cos, sin))
        determinant = (cos * other_cos).addcmul_(sin, other_sin)
        determinant[(cos == 0) & (sin == 0) & (other_cos == 0) & (other_sin == 0)] = 1.0
        cos, sin = other_cos / determinant, other_sin / determinant
    # in place where no rounding comes behind
    turned = torch.mul(operand, cos, out=y_turning) if out_dtype == dtype else operand * cos
    (x1, x2), (y1, y2), (s1, s2) = (t.chunk(2, -1) for t in (operand, turned, sin))
    y1.addcmul_(x2, s2 if transposed else s1, value=1 if transposed else -1)
    y2.addcmul_(x1, s1 if transposed else s2, value=-1 if transposed else 1)
    if turned is not y_turning:
        y_turning.copy_(turned)
    if partial:
        y[..., size:] = x[..., size:]
    return y


def adapter_weights(lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both weights of a low-rank adapter in ``dtype``, their rank padded with zeros (`padded_rank`).

    Args:
        lora_A: ``[r, F]``.
        lora_B: ``[O, r]``.
        dtype: of the results, ``[R, F]`` and ``[O, R]``.
    """
    more = padded_rank(lora_A.shape[0], dtype) - lora_A.shape[0]
    lora_A, lora_B = cast(lora_A, dtype), cast(lora_B, dtype)
    return (F.pad(lora_A, (0, 0, 0, more)), F.pad(lora_B, (0, more))) if more else (lora_A, lora_B)


def scaled_gradients(
    products: Tensor, weight: Tensor, factors: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """``rowsum(products * weight)``, at least in float32, and ``factors * products`` in ``dtype``.

    Args:
        products: ``[O, F]``, at least in float32.
        weight: ``[O, F]``.
        factors: ``[O]`` or ``[1]``.
        dtype: None: the second is not asked for.
    """
    sums = (products * weight).sum(1, dtype=wide(products.dtype))
    return sums, None if dtype is None else (products * factors.unsqueeze(1)).to(dtype)
