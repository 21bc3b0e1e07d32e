"""The ops as torch.compile sees them: plain tensor code, with marks that say what is saved.

An operator that the compiler cannot look into costs the fusion with its neighbours: a norm with the
residual's addition, a cast with a product. So nothing here is one. Left to itself, the compiler's
partitioner would save what it can, and undo the plan; two means hold it:

- elementwise ops stand in a region of activation checkpointing, whose tags the partitioner obeys: their
  values are recomputed in backward, fused into whatever reads them;
- a norm's backward is written in terms of its output or of z, so that its input is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_patch import reference
from lowmem_patch.constants import ActivationKind, NormSettings


def _recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    y: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def _activation(x: Tensor, kind: ActivationKind, up: Tensor | None) -> Tensor:
    y = reference.activate(x, kind)
    return y if up is None else y * up


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``, cast again in backward."""
    return _recomputed(_cast, tensor, dtype)


def activation(x: Tensor, kind: ActivationKind, up: Tensor | None = None) -> Tensor:
    """h(x) or h(x) * up, recomputed from these in backward."""
    return _recomputed(_activation, x, kind, up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """F.linear in ``dtype``; casts of ``x`` and ``weight`` are repeated in backward."""
    device = x.device.type
    with torch.autocast(device, enabled=False):
        if x.dtype != dtype:
            x = cast(x, dtype)
        if weight.dtype != dtype:
            weight = cast(weight, dtype)
        return F.linear(x, weight, None if bias is None else bias.to(dtype))


class _Norm(torch.autograd.Function):
    """`reference.norm` and `reference.norm_backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: NormSettings,
        out_dtype: torch.dtype,
        saved_dtype: torch.dtype,
    ) -> Tensor:
        y, rstd = reference.norm(x, weight, bias, settings, out_dtype)
        ctx.save_for_backward(reference.cast(y, saved_dtype), rstd, weight, bias)
        ctx.settings, ctx.input_dtype = settings, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, rstd, weight, bias = ctx.saved_tensors
        rest = (ctx.settings, ctx.input_dtype, ctx.needs_input_grad[:3])
        gradients = reference.norm_backward(dy, y, rstd.squeeze(-1), weight, bias, *rest)
        return (*gradients, None, None, None)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    saved_dtype: torch.dtype | None = None,
    *,
    saves_z: bool = False,
) -> Tensor:
    """LayerNorm or RMSNorm that saves its output or, right for a gamma of 0, z, rounded to ``saved_dtype``.

    By default that is ``out_dtype``. Give the dtype to which Linears cast the output: the compiler makes one
    cast of the two. Behind z, the affine is computed again in backward, fused into whatever reads it.
    """
    apply: Any = _Norm.apply
    saved = out_dtype if saved_dtype is None else saved_dtype
    if not saves_z:
        y: Tensor = apply(x, weight, bias, settings, out_dtype, saved)
        return y
    z = apply(x, None, None, settings, saved, saved)
    return _recomputed(reference.affine, z, weight, bias, settings, out_dtype)
