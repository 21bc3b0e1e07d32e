"""Every op in eager torch: any device, float64-capable; the oracle of the tests and the fallback.

Functions take and return tensors only: no autograd, no choice of implementation. The module
`lowmem_patch.kernels` has the same functions with the same signatures. Arithmetic is float64 for
float64 tensors and float32 otherwise; each result is rounded once, to its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import (
    CODES_PER_WORD,
    QUICK_GELU_SCALE,
    STEP_TABLES,
    ActivationKind,
    padded_rank,
)

__all__ = [
    "activate",
    "activate_backward",
    "adapter_weights",
    "affine",
    "cast",
    "codes_backward",
    "codes_forward",
    "drop",
    "glu_backward",
    "glu_forward",
    "norm_backward",
    "norm_forward",
    "normalised",
    "pack_bool",
    "rotate",
    "unpack_bool",
]


def _arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def activate(x: Tensor, kind: ActivationKind, out_dtype: torch.dtype | None = None) -> Tensor:
    """The framework's own activation function.

    Args:
        x: ``[...]``, floating point.
        kind: which activation.
        out_dtype: dtype of the result, ``x.dtype`` by default.
    """
    match kind:
        case "gelu":
            y = F.gelu(x)
        case "gelu_tanh":
            y = F.gelu(x, approximate="tanh")
        case "silu":
            y = F.silu(x)
        case "quick_gelu":
            y = x * torch.sigmoid(QUICK_GELU_SCALE * x)
        case "relu_squared":
            y = F.relu(x).square()
    return y if out_dtype is None else y.to(out_dtype)


def activate_backward(
    dy: Tensor, x: Tensor, kind: ActivationKind, hidden: Tensor | None = None
) -> Tensor:
    """dx = dy * h'(x), shape and dtype of ``x``; torch's own formulas.

    ``hidden``, where given, is overwritten with h(x); it may be ``dy`` itself.
    """
    dy = dy.to(x.dtype)
    dx: Tensor
    match kind:
        case "gelu":
            dx = torch.ops.aten.gelu_backward(dy, x)
        case "gelu_tanh":
            dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        case "silu":
            dx = torch.ops.aten.silu_backward(dy, x)
        case "quick_gelu":
            # h(x) = silu(s x) / s, so h'(x) = silu'(s x)
            dtype = _arithmetic_dtype(x.dtype)
            scaled = QUICK_GELU_SCALE * x.to(dtype)
            dx = torch.ops.aten.silu_backward(dy.to(dtype), scaled).to(x.dtype)
        case "relu_squared":
            dx = dy * (2 * F.relu(x))
    if hidden is not None:
        hidden.copy_(activate(x, kind))
    return dx


def codes_forward(x: Tensor, kind: ActivationKind) -> tuple[Tensor, Tensor]:
    """y = h(x) and, for each element, the number of thresholds below it in two bits.

    Args:
        x: ``[...]``, n elements.
        kind: which activation and which step table.

    Returns:
        y like ``x``, contiguous; codes ``[ceil(n / 8)]`` int16, laid out as `CODES_PER_WORD` says.
    """
    # float32, because comparing a half tensor with a Python number rounds the number to half
    flat = x.reshape(-1).to(_arithmetic_dtype(x.dtype))
    codes = torch.zeros_like(flat, dtype=torch.int16)
    for threshold in STEP_TABLES[kind].thresholds:
        codes += flat > threshold
    codes = F.pad(codes, (0, -flat.numel() % CODES_PER_WORD)).view(-1, CODES_PER_WORD)
    words = torch.zeros(codes.shape[0], dtype=torch.int16, device=x.device)
    for position in range(CODES_PER_WORD):
        words |= codes[:, position] << 2 * position
    return activate(x, kind).contiguous(), words


def codes_backward(dy: Tensor, codes: Tensor, kind: ActivationKind, dtype: torch.dtype) -> Tensor:
    """dx = dy * level[code], shape of ``dy``, contiguous, in ``dtype``."""
    positions = torch.arange(0, 2 * CODES_PER_WORD, 2, dtype=torch.int16, device=dy.device)
    unpacked = (codes[:, None] >> positions) & 3
    arithmetic = _arithmetic_dtype(dy.dtype)
    levels = torch.tensor(STEP_TABLES[kind].levels, dtype=arithmetic, device=dy.device)
    slopes = levels[unpacked.view(-1)[: dy.numel()].int()].view(dy.shape)
    return (dy.contiguous().to(arithmetic) * slopes).to(dtype)


def glu_forward(
    gate: Tensor, up: Tensor, kind: ActivationKind, out_dtype: torch.dtype | None = None
) -> Tensor:
    """h(gate) * up in torch's own arithmetic; contiguous, in ``out_dtype`` or the promoted dtype."""
    y = activate(gate, kind) * up
    return (y if out_dtype is None else y.to(out_dtype)).contiguous()


def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, kind: ActivationKind, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """d_gate = dy * up * h'(gate) and d_up = dy * h(gate), contiguous, each in its input's dtype.

    ``hidden``, where given, is overwritten with h(gate) * up; it may be ``dy`` itself.
    """
    dtype = _arithmetic_dtype(torch.promote_types(gate.dtype, up.dtype))
    wide_dy, wide_gate = dy.to(dtype), gate.to(dtype)
    d_gate = activate_backward(wide_dy * up.to(dtype), wide_gate, kind).to(gate.dtype)
    d_up = (wide_dy * activate(wide_gate, kind)).to(up.dtype)
    if hidden is not None:
        hidden.copy_(activate(gate, kind) * up)
    return d_gate.contiguous(), d_up.contiguous()


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    out_dtype: torch.dtype,
    z_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y = z (weight + weight_offset) + bias with z = (x - mean) rstd over the last dimension.

    Args:
        x: ``[..., N]``.
        weight: ``[N]`` or None for no factor at all.
        bias: ``[N]`` or None.
        eps: added to the variance.
        weight_offset: 1 for norms that multiply by (1 + w).
        centered: subtract the mean (LayerNorm) or not (RMSNorm).
        out_dtype: dtype of y.
        z_dtype: dtype of z, None where it is not asked for.

    Returns:
        y ``[..., N]``, contiguous; rstd ``[...]`` in float32 (float64 for a float64 x); z like y, or None.
    """
    z, rstd = normalised(x, None, None, eps, 0.0, centered, _arithmetic_dtype(x.dtype))
    y = affine(z, weight, bias, weight_offset, out_dtype)
    kept = None if z_dtype is None else cast(z, z_dtype).contiguous()
    return y, rstd.squeeze(-1).contiguous(), kept


def affine(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, dtype: torch.dtype
) -> Tensor:
    """z (weight + offset) + bias over the last dimension, contiguous, in ``dtype``."""
    y = cast(z, _arithmetic_dtype(z.dtype))
    if weight is not None:
        gamma = cast(weight, y.dtype)
        y = y * (gamma + offset if offset else gamma)
    if bias is not None:
        y = y + cast(bias, y.dtype)
    return cast(y, dtype).contiguous()


def normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The formula of `norm_forward`, in whatever strides; rstd ``[..., 1]``."""
    dtype = _arithmetic_dtype(x.dtype)
    wide = cast(x, dtype)
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        gamma = cast(weight, dtype)
        y = y * (gamma + weight_offset if weight_offset else gamma)
    if bias is not None:
        y = y + cast(bias, dtype)
    return cast(y, out_dtype), rstd


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
    weight_offset: float,
    centered: bool,
    input_dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
    normalized: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `norm_forward` from its output, or from z (``normalized``) in the place of y.

    gamma = weight + weight_offset, z = (y - bias) / gamma, g = dy gamma:
    dx = rstd (g - mean(g) - z mean(g z)), without mean(g) when not centered;
    d_weight = sum over rows of dy z; d_bias = sum over rows of dy.
    Where gamma is exactly 0, z cannot be recovered and 0 is used in its place.
    Saved: y, rstd, weight, bias; x is not needed.
    """
    dtype = rstd.dtype
    size = dy.shape[-1]
    wide_dy = dy.to(dtype)
    dx = d_weight = d_bias = None
    if needs_bias and bias is not None:
        d_bias = wide_dy.reshape(-1, size).sum(0).to(bias.dtype)
    if not (needs_input or needs_weight):
        return dx, d_weight, d_bias
    g, z = wide_dy, y.to(dtype)
    if bias is not None and not normalized:
        z = z - bias.to(dtype)
    if weight is not None:
        gamma = weight.to(dtype) + weight_offset
        if not normalized:
            z = torch.where(gamma == 0, 0.0, z / gamma)
        g = g * gamma
    if needs_input:
        dx = g - z * (g * z).mean(-1, keepdim=True)
        if centered:
            dx = dx - g.mean(-1, keepdim=True)
        dx = (dx * rstd.unsqueeze(-1)).to(input_dtype).contiguous()
    if needs_weight and weight is not None:
        d_weight = (wide_dy * z).reshape(-1, size).sum(0).to(weight.dtype)
    return dx, d_weight, d_bias


def pack_bool(mask: Tensor) -> Tensor:
    """Eight flags a byte, first flag lowest: ``[ceil(n / 8)]`` uint8."""
    flags = F.pad(mask.reshape(-1).to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    packed = torch.zeros(flags.shape[0], dtype=torch.uint8, device=mask.device)
    for position in range(8):
        packed |= flags[:, position] << position
    return packed


def unpack_bool(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool tensor of ``shape`` that `pack_bool` packed."""
    positions = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flags = (packed[:, None] >> positions) & 1
    return flags.view(-1)[: prod(shape)].view(*shape).bool()


def drop(
    x: Tensor, bits: Tensor, scale: float, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """x times ``scale`` where the bit is 1 and times 0 elsewhere, contiguous, in ``out_dtype``.

    ``x`` and the product are rounded to ``dtype``, in which torch would have computed.

    Args:
        x: ``[...]``, n elements.
        bits: ``[ceil(n / 8)]`` uint8, from `pack_bool`.
    """
    arithmetic = _arithmetic_dtype(dtype)
    factor = unpack_bool(bits, x.shape).to(arithmetic) * scale
    return (x.to(dtype).to(arithmetic) * factor).to(dtype).to(out_dtype).contiguous()


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    transposed: bool,
    strides: Sequence[int] | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The rotary position embedding of one tensor, or its transpose, which backward needs.

    With the first R columns in halves x1 and x2, cos = (c1, c2) and sin = (s1, s2):
    y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2; transposed y1 = x1 c1 + x2 s2, y2 = x2 c2 - x1 s1. The other
    columns are copied.

    Args:
        x: ``[B, H, S, D]`` or, with ``heads_dim`` 2, ``[B, S, H, D]``.
        cos, sin: ``[B or 1, S, R]``, R even and at most D.
        heads_dim: 1 or 2.
        transposed: the transpose.
        strides: of the result; None for those of ``torch.empty_like(x)``.
        out_dtype: dtype of the result.
    """
    dtype = _arithmetic_dtype(x.dtype)
    if strides is None:
        y = torch.empty_like(x, dtype=out_dtype)
    else:
        y = torch.empty_strided(x.shape, strides, dtype=out_dtype, device=x.device)
    size, partial = cos.shape[-1], cos.shape[-1] < x.shape[-1]
    x_turning, y_turning = (x[..., :size], y[..., :size]) if partial else (x, y)
    wide = cast(x_turning, dtype)
    cos, sin = (cast(angles.unsqueeze(heads_dim), dtype) for angles in (cos, sin))
    # in place where no rounding comes behind
    turned = torch.mul(wide, cos, out=y_turning) if out_dtype == dtype else wide * cos
    (x1, x2), (y1, y2), (s1, s2) = (t.chunk(2, -1) for t in (wide, turned, sin))
    y1.addcmul_(x2, s2 if transposed else s1, value=1 if transposed else -1)
    y2.addcmul_(x1, s1 if transposed else s2, value=-1 if transposed else 1)
    if turned is not y_turning:
        y_turning.copy_(turned)
    if partial:
        y[..., size:] = x[..., size:]
    return y


def adapter_weights(down: Tensor, raised: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both weights of a low-rank adapter in ``dtype``, their rank padded with zeros (`padded_rank`).

    Args:
        down: A, ``[r, F]``.
        raised: B, ``[O, r]``.
        dtype: of the results, ``[R, F]`` and ``[O, R]``.
    """
    more = padded_rank(down.shape[0], dtype) - down.shape[0]
    down, raised = cast(down, dtype), cast(raised, dtype)
    return (F.pad(down, (0, 0, 0, more)), F.pad(raised, (0, more))) if more else (down, raised)
