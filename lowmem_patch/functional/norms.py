"""Norms that keep their output, which the next Linear keeps anyway, instead of their input.

MS-BP (arXiv 2406.16282, section 5): with z = (x - mean) rstd, gamma = weight + offset and
y = z gamma + bias, backward needs z and rstd only, and z = (y - bias) / gamma:

    g = dy gamma,    dx = rstd (g - mean(g) - z mean(g z)),    d_weight = sum dy z,  d_bias = sum dy

(RMSNorm: no mean(g)). Saved: y, rstd (one number a row), weight and bias. y shares its storage with
the input of the Linears behind it. Where gamma may come near 0, z is saved in the place of y, and the
Linears save the same z (`affine_linear`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import _library, sharded
from lowmem_patch.functional._checks import check_floating, check_last_dimension
from lowmem_patch.functional._implementation import Implementation, module, resolve

__all__ = ["ms_layer_norm", "ms_rms_norm", "norm_and_z", "norm_gradients", "save_copy"]


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    out_dtype: torch.dtype,
    z_dtype: torch.dtype | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, rstd, and z, which is empty where ``z_dtype`` is None."""
    y, rstd, z = module(implementation).norm_forward(
        x, weight, bias, eps, weight_offset, centered, out_dtype, z_dtype
    )
    return y, rstd, rstd.new_empty(0) if z is None else z


def _forward_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    out_dtype: torch.dtype,
    z_dtype: torch.dtype | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(
        x.shape[:-1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32
    )
    z = rstd.new_empty(0) if z_dtype is None else x.new_empty(x.shape, dtype=z_dtype)
    return x.new_empty(x.shape, dtype=out_dtype), rstd, z


def _backward(
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
    normalized: bool,
    implementation: str,
) -> list[Tensor]:
    gradients = module(implementation).norm_backward(
        dy,
        y,
        rstd,
        weight,
        bias,
        weight_offset,
        centered,
        input_dtype,
        needs_input,
        needs_weight,
        needs_bias,
        normalized,
    )
    return [gradient for gradient in gradients if gradient is not None]


def _backward_fake(
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
    normalized: bool,
    implementation: str,
) -> list[Tensor]:
    gradients = [dy.new_empty(dy.shape, dtype=input_dtype)] if needs_input else []
    if needs_weight and weight is not None:
        gradients.append(torch.empty_like(weight))
    if needs_bias and bias is not None:
        gradients.append(torch.empty_like(bias))
    return gradients


_norm_forward = _library.define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float weight_offset, bool centered, "
    "ScalarType out_dtype, ScalarType? z_dtype, str implementation) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_norm_backward = _library.define(
    "norm_backward(Tensor dy, Tensor y, Tensor rstd, Tensor? weight, Tensor? bias, "
    "float weight_offset, bool centered, ScalarType input_dtype, bool needs_input, "
    "bool needs_weight, bool needs_bias, bool normalized, str implementation) -> Tensor[]",
    _backward,
    _backward_fake,
)


def norm_gradients(
    ctx: Any, dy: Tensor, y: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that are asked for of x, weight and bias, which are arguments 1 to 3 of a Function.

    ``ctx.settings`` is (weight_offset, centered, dtype of x, whether ``y`` is z, implementation).
    """
    weight_offset, centered, input_dtype, normalized, implementation = ctx.settings
    _, needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    backward = _backward if _library.is_eager(dy, y) else _norm_backward
    found = iter(
        backward(
            dy,
            y,
            rstd,
            weight,
            bias,
            weight_offset,
            centered,
            input_dtype,
            needs_input,
            needs_weight,
            needs_bias,
            normalized,
            implementation,
        )
    )
    return (
        next(found) if needs_input else None,
        next(found) if needs_weight else None,
        next(found) if needs_bias else None,
    )


def save_copy(node: Any, y: Tensor) -> None:
    """Let a norm's backward read a copy of its output, into which somebody may be about to write unseen.

    Args:
        node: the ``grad_fn`` of the norm's output; any other is left alone.
        y: the output, without a gradient.
    """
    if getattr(node, "written", True) is None:
        node.written = y.clone()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        direct: bool,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        weight_offset: float,
        centered: bool,
        out_dtype: torch.dtype,
        z_dtype: torch.dtype | None,
        implementation: str,
    ) -> Any:
        arguments = (
            x, weight, bias, eps, weight_offset, centered, out_dtype, z_dtype, implementation,
        )  # fmt: skip
        alone = direct and z_dtype is None
        if direct:
            y, rstd, z = _forward(*arguments)
        else:
            with _library.below_autograd():
                y, rstd, z = _norm_forward(*arguments)
        if not alone:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(rstd, z)
        _, needs_input, needs_weight, *_ = ctx.needs_input_grad
        if needs_input or needs_weight:
            ctx.save_for_backward(y if z_dtype is None else z, rstd, weight, bias)
        else:
            # d_bias needs dy alone; the empty tensors stand in for what is not read
            ctx.save_for_backward(y.new_empty(0), rstd.new_empty(0), None, bias)
        ctx.settings = (weight_offset, centered, x.dtype, z_dtype is not None, implementation)
        ctx.written = None  # of `save_copy`
        return y if alone else (y, rstd, z)

    @staticmethod
    @_library.first_order("norm")
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        if dy is None:
            return (None,) * 10
        y, *others = _library.saved_tensors(ctx, "the output of a norm, or its weight or bias,")
        y = y if ctx.written is None else ctx.written
        return (None, *norm_gradients(ctx, dy, y, *others), *(None,) * 6)


_call_norm = _library.attach_autograd(_norm_forward, _Norm, outputs=3)


def ms_layer_norm(
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """LayerNorm over the last dimension that saves its output and one rstd per row.

    The gradient is exact up to the rounding of y; it asks for entries of ``weight`` that are not
    tiny against those of ``bias``, since z = (y - bias) / weight. Statistics and products are
    float32 inside (float64 for float64), whatever autocast says.

    Args:
        x: ``[..., N]``, float16, bfloat16, float32 or float64.
        eps: added to the variance.
        weight, bias: ``[N]`` or None; their dtype may differ from that of ``x``.
        out_dtype: dtype of the result, by default ``x.dtype``; give the consumers' compute dtype so
            that they save this very tensor.
        weight_offset: 1.0 for norms that multiply by (1 + weight).
        implementation: see `resolve`.

    Returns:
        ``[..., N]`` in ``out_dtype``, contiguous.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: shapes do not fit.
    """
    return _norm(
        "ms_layer_norm", x, eps, weight, bias, weight_offset, True, out_dtype, implementation
    )


def ms_rms_norm(
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """RMSNorm over the last dimension that saves its output and one rstd per row.

    As `ms_layer_norm`, without mean and bias.

    Args:
        x: ``[..., N]``, float16, bfloat16, float32 or float64.
        eps: added to the mean square.
        weight: ``[N]`` or None; its dtype may differ from that of ``x``.
        weight_offset: 1.0 for norms that multiply by (1 + weight).
        out_dtype: dtype of the result, by default ``x.dtype``.
        implementation: see `resolve`.

    Returns:
        ``[..., N]`` in ``out_dtype``, contiguous.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: shapes do not fit.
    """
    return _norm(
        "ms_rms_norm", x, eps, weight, None, weight_offset, False, out_dtype, implementation
    )


def _norm(
    operator: str,
    x: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    centered: bool,
    out_dtype: torch.dtype | None,
    implementation: Implementation,
) -> Tensor:
    check_floating(operator, "x", x)
    check_last_dimension(operator, x, weight, bias)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    chosen = resolve(implementation, x, weight, bias)
    # the float64 oracle must not be asked for by mixing dtypes by accident
    if (x.dtype == torch.float64) != (out_dtype == torch.float64):
        raise TypeError(f"{operator}: x is {x.dtype} but out_dtype is {out_dtype}")
    if sharded.is_sharded(x, weight, bias):
        return sharded.norm(x, weight, bias, eps, weight_offset, centered, out_dtype)
    if _library.wants_gradient(x, weight, bias):
        return _first(
            _call_norm(x, weight, bias, eps, weight_offset, centered, out_dtype, None, chosen)
        )
    plain = all(t is None or t.dtype == x.dtype for t in (weight, bias))
    plain = plain and weight_offset == 0.0 and not torch.is_autocast_enabled(x.device.type)
    if _library.is_exporting() and not (plain and centered):  # ONNX has no RMSNorm
        settings = (eps, weight_offset, centered, out_dtype, None, "reference")
        return _first(_forward(x, weight, bias, *settings))
    if plain and out_dtype == x.dtype:
        if centered:
            return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if _library.in_forward_mode():
        return _first(
            _call_norm(x, weight, bias, eps, weight_offset, centered, out_dtype, None, chosen)
        )
    # autocast would make F.layer_norm return float32
    forward = _forward if _library.is_eager(x, weight, bias) else _norm_forward
    return _first(forward(x, weight, bias, eps, weight_offset, centered, out_dtype, None, chosen))


def _first(results: Any) -> Tensor:
    y: Tensor = results[0] if isinstance(results, tuple) else results
    return y


def norm_and_z(
    x: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    centered: bool,
    out_dtype: torch.dtype,
    z_dtype: torch.dtype,
    weight_offset: float = 0.0,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """LayerNorm (``centered``) or RMSNorm over the last dimension that saves z, exact for every weight.

    Args:
        x: ``[..., N]``, floating.
        eps: added to the variance (mean square).
        weight, bias: ``[N]`` or None.
        out_dtype: of the output.
        z_dtype: in which z is saved.
        weight_offset: 1.0 for norms that multiply by (1 + weight).

    Returns:
        y = z (weight + offset) + bias and z, ``[..., N]``; z is without a gradient.

    Raises:
        TypeError: x, weight or bias is not floating point.
        ValueError: weight or bias does not fit the last dimension.
    """
    check_floating("norm_and_z", "x", x)
    check_last_dimension("norm_and_z", x, weight, bias)
    chosen = resolve(implementation, x, weight, bias)
    y, _, z = _call_norm(x, weight, bias, eps, weight_offset, centered, out_dtype, z_dtype, chosen)
    return y, z
