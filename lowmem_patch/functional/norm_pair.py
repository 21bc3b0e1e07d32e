"""A norm whose output is read in two dtypes: in full by a residual, in autocast's dtype by Linears.

Post-norm models under autocast (BERT) keep the norm's wide input and one narrow copy of its output
per Linear. Here the narrow output is made once, the Linears share it, and the norm's backward
recovers z from it as in `norms`, or from z in the narrow dtype where that is asked for; the gradients of
both outputs are added first.

Saved: the narrow output or the narrow z, rstd, weight and bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library, sharded
from lowmem_patch.functional._checks import check_floating, check_last_dimension
from lowmem_patch.functional._implementation import Implementation, module, resolve
from lowmem_patch.functional.norms import norm_gradients

__all__ = ["ms_norm_pair"]


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    wide: torch.dtype,
    narrow: torch.dtype,
    with_z: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, its copy, z (empty where it is not asked for) and rstd."""
    y, rstd, z = module(implementation).norm_forward(
        x, weight, bias, eps, weight_offset, centered, wide, narrow if with_z else None
    )
    return y, y.to(narrow), rstd.new_empty(0) if z is None else z, rstd


def _forward_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    wide: torch.dtype,
    narrow: torch.dtype,
    with_z: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rstd_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = x.new_empty(x.shape[:-1], dtype=rstd_dtype)
    return (
        x.new_empty(x.shape, dtype=wide),
        x.new_empty(x.shape, dtype=narrow),
        x.new_empty(x.shape, dtype=narrow) if with_z else rstd.new_empty(0),
        rstd,
    )


_pair_forward = _library.define(
    "norm_pair(Tensor x, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
    "bool centered, ScalarType wide, ScalarType narrow, bool with_z, str implementation) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)


class _NormPair(torch.autograd.Function):
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
        wide: torch.dtype,
        narrow: torch.dtype,
        with_z: bool,
        implementation: str,
    ) -> Any:
        arguments = (
            x, weight, bias, eps, weight_offset, centered, wide, narrow, with_z, implementation,
        )  # fmt: skip
        if direct:
            y, copy, z, rstd = _forward(*arguments)
            ctx.mark_non_differentiable(z)
        else:
            with _library.below_autograd():
                y, copy, z, rstd = _pair_forward(*arguments)
            ctx.mark_non_differentiable(z, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z if with_z else copy, rstd, weight, bias)
        ctx.settings = (weight_offset, centered, x.dtype, with_z, implementation)
        return (y, copy, z) if direct else (y, copy, z, rstd)

    @staticmethod
    @_library.first_order("norm_pair")
    def backward(ctx: Any, dy: Tensor | None, d_copy: Tensor | None, *_: None) -> Any:
        if dy is None or d_copy is None:
            total = d_copy if dy is None else dy
        else:
            total = torch.add(dy, d_copy)
        if total is None:
            return (None,) * 11
        return (None, *norm_gradients(ctx, total, *ctx.saved_tensors), *(None,) * 7)


_call_pair = _library.attach_autograd(_pair_forward, _NormPair, outputs=3)


def ms_norm_pair(
    x: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    centered: bool,
    wide: torch.dtype,
    narrow: torch.dtype,
    weight_offset: float = 0.0,
    with_z: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm (``centered``) or RMSNorm over the last dimension, in two dtypes at once.

    Args:
        x: ``[..., N]``, floating.
        eps: added to the variance (mean square).
        weight, bias: ``[N]`` or None.
        wide, narrow: dtypes of the two results.
        weight_offset: 1.0 for 1 + w norms.
        with_z: save z, in ``narrow``, and not the narrow output.

    Returns:
        ``[..., N]`` in ``wide``; the same rounded to ``narrow``, which is what is saved; z, without a
        gradient, which is empty where it is not asked for.

    Raises:
        TypeError: x, weight or bias is not floating point.
        ValueError: weight or bias does not fit the last dimension.
    """
    check_floating("ms_norm_pair", "x", x)
    check_last_dimension("ms_norm_pair", x, weight, bias)
    if sharded.is_sharded(x, weight, bias):
        wide_y = sharded.norm(x, weight, bias, eps, weight_offset, centered, wide)
        copy = wide_y.to(narrow)
        return wide_y, copy, copy.detach()
    chosen = resolve(implementation, x, weight, bias)
    arguments = (x, weight, bias, eps, weight_offset, centered, wide, narrow, with_z, chosen)
    # through the operator where somebody traces: compilers and fake tensors must not meet a launch
    if _library.wants_gradient(x, weight, bias) or _library.in_forward_mode():
        y, copy, z = _call_pair(*arguments)
    else:
        forward = _forward if _library.is_eager(x, weight, bias) else _pair_forward
        y, copy, z, _ = forward(*arguments)
    return y, copy, z
