"""The ops as torch.compile and DTensors see them: plain tensor code, with marks that say what is saved.

An operator that the compiler cannot look into costs the fusion with its neighbours: a norm with the
residual's addition, a cast with a product. So nothing here is one. Left to itself, the compiler's
partitioner would save what it can, and undo the plan; two means hold it:

- elementwise ops stand in a region of activation checkpointing, whose tags the partitioner obeys: their
  values are recomputed in backward, fused into whatever reads them;
- a norm's backward is written in terms of its output or of z, so that its input is not asked for.

What is stored in 8 bits is made by an operator: the partitioner computes none a second time, and so saves
what it gives, once for all who store the same tensor.

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
from lowmem_patch.functional._implementation import resolve
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES, matrix_values, stored_in_graph
from lowmem_patch.functional.products import IDENTITY, LowRank, linear_op
from lowmem_patch.functional.products_backward import linear_backward_of_eight_bits, one_for_each


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


class _StoredLinear(torch.autograd.Function):
    """The op of `lowmem_patch.functional.linear`, whose sources are saved in 8 bits."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        source, up, weight, bias, lora_A, lora_B, scale, kind, dtype, implementation = arguments
        # in no region: its tags would have the sources saved for a value that nobody reads in backward
        hidden = source if kind == IDENTITY else _activation(source, kind, up)
        products = (weight, bias, lora_A, lora_B, scale)
        y: Tensor
        y, low = linear_op.traced(hidden, source, up, *products, kind, dtype, implementation)
        parts = (*stored_in_graph(source), *((None, None) if up is None else stored_in_graph(up)))
        ctx.save_for_backward(*parts, weight, lora_A, lora_B, None if lora_A is None else low)
        ctx.settings, ctx.implementation = (scale, kind), implementation
        # an absent tensor's dtype is never read
        ctx.dtypes = [None if t is None else t.dtype for t in arguments[:6]]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        parts, rest = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        for_source, for_up, *for_rest = ctx.needs_input_grad[:6]
        for_input = for_source or for_up
        needs = [for_input, *for_rest]
        found = linear_backward_of_eight_bits.traced(
            dy, *parts, ctx.dtypes[0], *rest, *ctx.settings, needs, ctx.implementation
        )
        needs = [for_input, for_input and parts[2] is not None, *for_rest]
        return (*one_for_each(found, needs, ctx.dtypes), *(None,) * 4)


def stored_linear(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    adapter: LowRank | None,
    dtype: torch.dtype,
    kind: str = IDENTITY,
) -> Tensor:
    """F.linear of h(sources) in ``dtype``, plus an adapter's product, that saves ``sources`` in 8 bits.

    ``kind``: of h, by default none: the one source is the input.
    """
    if kind == IDENTITY and sources[0].dtype != dtype:
        sources = (cast(sources[0], dtype),)  # as a norm stores it
    up = sources[1] if len(sources) == 2 else None
    rest = (None, None, 1.0) if adapter is None else adapter
    apply: Any = _StoredLinear.apply
    chosen = resolve("auto", *sources)
    y: Tensor = apply(sources[0], up, weight, bias, *rest, kind, dtype, chosen)
    return y


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
        eight_bits: bool,
        saves_z: bool,
    ) -> Tensor:
        y, rstd = reference.norm(x, weight, bias, settings, out_dtype)
        if saves_z:
            saved, _ = reference.norm(x, None, None, settings, saved_dtype)
        else:
            saved = reference.cast(y, saved_dtype)
        parts = stored_in_graph(saved) if eight_bits else (saved, None)
        ctx.save_for_backward(*parts, rstd, weight, bias)
        ctx.settings, ctx.dtypes, ctx.saves_z = settings, (x.dtype, saved_dtype), saves_z
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, scales, rstd, weight, bias = ctx.saved_tensors
        input_dtype, saved_dtype = ctx.dtypes
        if scales is not None:
            y = matrix_values(y, scales, saved_dtype)
        rstd = rstd.squeeze(-1)
        rest = (ctx.settings, input_dtype, ctx.needs_input_grad[:3], ctx.saves_z)
        gradients = reference.norm_backward(dy, y, rstd, weight, bias, *rest)
        return (*gradients, *(None,) * 5)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    saved_dtype: torch.dtype | None = None,
    saves_z: bool = False,
    eight_bits: bool = False,
) -> Tensor:
    """LayerNorm or RMSNorm that saves its output or, right for a gamma of 0, z, rounded to ``saved_dtype``.

    By default that is ``out_dtype``. Give the dtype to which Linears cast the output: the compiler makes one
    cast of the two. Behind z, the affine is computed again in backward, fused into whatever reads it; not so
    where ``eight_bits`` are stored of z, beside those that Linears store of the output.
    """
    apply: Any = _Norm.apply
    saved = out_dtype if saved_dtype is None else saved_dtype
    eight_bits = eight_bits and saved in EIGHT_BIT_DTYPES
    if eight_bits or not saves_z:
        y: Tensor = apply(x, weight, bias, settings, out_dtype, saved, eight_bits, saves_z)
        return y
    z = apply(x, None, None, settings, saved, saved, False, False)
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
