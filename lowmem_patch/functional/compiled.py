"""The ops as torch.compile and DTensors see them: plain tensor code, with marks that say what is saved.

An operator that the compiler cannot look into costs the fusion with its neighbours: a norm with the
residual's addition, a cast with a product. So nothing here is one. Left to itself, the compiler's
partitioner would save what it can, and undo the plan; two means hold it:

- elementwise ops stand in a region of activation checkpointing, whose tags the partitioner obeys: their
  values are recomputed in backward, fused into whatever reads them;
- a norm's backward is written in terms of its output or of z, so that its input is not asked for.

Torch knows of none but its own ops how to shard them, so DTensors take the same way. A norm of them saves its
input: where that is sharded by the sequence, the Linears behind it read a gathered copy of its output, and
share nothing with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_patch import reference
from lowmem_patch.constants import ActivationKind, NormSettings
from lowmem_patch.functional import _library


def _recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    y: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def _activation(x: Tensor, kind: ActivationKind, up: Tensor | None) -> Tensor:
    y = reference.activate(x, kind)
    return y if up is None else y * up


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``, cast again in backward."""
    return _recomputed(reference.cast, tensor, dtype)


def activation(x: Tensor, kind: ActivationKind, up: Tensor | None = None) -> Tensor:
    """h(x) or h(x) * up, recomputed from these in backward."""
    return _recomputed(_activation, x, kind, up)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    adapter: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """F.linear in ``dtype``, plus an adapter's product; casts are repeated in backward."""
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype != dtype:
            x = cast(x, dtype)
        if weight.dtype != dtype:
            weight = cast(weight, dtype)
        y = F.linear(x, weight, None if bias is None else bias.to(dtype))
    if adapter is None:
        return y
    lora_A, lora_B, scale = adapter
    return y + linear(linear(x, lora_A, None, dtype), lora_B, None, dtype) * scale


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


_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def is_sharded(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor."""
    if _library.in_compiler():
        return False
    # a loop that most calls leave at once: this runs at each call of each op
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            module = sys.modules.get("torch.distributed.tensor")  # a second to import
            if module is not None and isinstance(tensor, module.DTensor):
                return True
    return False


def sharded_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    z_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`ms_norm` of DTensors, recomputed from ``x`` in backward."""
    z = None if z_dtype is None else _plain_norm(x.detach(), None, None, settings, z_dtype)
    arguments = (x, weight, bias, settings, out_dtype)
    if _library.wants_gradient(x, weight, bias):
        y = _recomputed(_plain_norm, *arguments)
    else:  # a checkpoint would hold the input
        y = _plain_norm(*arguments)
    return y, None if copy_dtype is None else y.to(copy_dtype), z


def _plain_norm(*arguments: Any) -> Tensor:
    return reference.norm(*arguments)[0]
