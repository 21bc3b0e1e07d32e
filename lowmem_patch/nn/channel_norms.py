"""Norms over channels whose output waits, so that it and an activation of it are computed again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import (
    ActivationKind,
    ChannelNorm,
    channel_statistics,
    recomputed_linear,
    without_grad,
)
from lowmem_patch.nn.context import is_foreign, unfreed
from lowmem_patch.nn.deferred import Deferred, defer, value_of
from lowmem_patch.nn.modes import ForwardMode
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.tracing.call_arguments import ChannelNormCall, channel_norm_call
from lowmem_patch.tracing.op_roles import Role, names_with


class NormedChannels(Op):
    """The output of a norm over channels, or an activation of it.

    The sources are x, mean, rstd, and the norm's weight and bias, those that there are.

    Args:
        norm: what is computed.
        reads: how many operators read the values before they are let go, as of `Activation`.
    """

    written_source = (
        "lowmem_patch: the input, the weight or the bias of a norm over channels was written in place, and "
        "the norm and its activation are computed of them again in backward: write after the backward, or "
        "leave this module alone (norms: keep)"
    )

    outlives = True

    def __init__(self, norm: ChannelNorm, reads: int = 1) -> None:
        self.norm, self.reads = norm, reads

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.norm.out_dtype

    def compute(self, *sources: Tensor) -> Tensor:
        return self.norm.value(*sources)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        return self.norm.gradients(dy, *sources)

    def activated(self, h: Any, kind: ActivationKind, reads: int, in_place: bool) -> Any:
        if self.norm.kind is not None or h.is_changed() or h.held or h._memory is not None:
            return NotImplemented
        op = NormedChannels(self.norm._replace(kind=kind), reads)
        if not in_place:
            h.was_bypassed, op.past = True, (weakref.ref(h),)
            return defer(op, h.sources)
        # whoever holds the norm's output, as a hook may, reads there what the activation wrote
        torch.autograd.graph.increment_version(h)
        h.op = h.grad_fn.op = op
        h._value, h._times_read, h._first_version = None, 0, h._version
        return h

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        if to.adapter is not None or not to.weight.requires_grad:
            return super().linear(h, to, dtype)

        def again(*sources: Tensor, dtype: torch.dtype) -> Tensor:
            return self.norm.value(*sources).to(dtype)

        return recomputed_linear(h.plain(), again, h.sources, to.weight, to.bias, dtype)


class DeferChannelNorms(ForwardMode):
    """Gives deferred tensors where the module's forward calls a norm over channels."""

    names = names_with(Role.CHANNEL_NORM)

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = func in _NORMS and self.packs_alike()
        given = channel_norm_call(func.__name__, args, kwargs) if known else None
        made = None if given is None else deferred_norm(given)
        return NotImplemented if made is None else made


_NORMS: tuple[Callable[..., Any], ...] = (F.batch_norm, F.group_norm, F.instance_norm)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def deferred_norm(given: ChannelNormCall) -> Deferred | None:
    """The norm's output; None where torch shall compute it, or say what is wrong."""
    x = value_of(given.x)
    given = given._replace(x=x)
    if not _may_wait(given):
        return None
    with without_grad():
        mean, rstd = channel_statistics(
            x, given.groups, given.eps, given.running_mean, given.running_var, given.momentum
        )
    # of the 16 bits of a GPU, autocast makes float32
    wide = given.name == "group_norm" and x.is_cuda and torch.is_autocast_enabled("cuda")
    dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
    vectors = [unfreed(vector) for vector in (given.weight, given.bias) if vector is not None]
    has = (given.weight is not None, given.bias is not None)
    norm = ChannelNorm(given.groups, *has, None, dtype)
    return defer(NormedChannels(norm), (x, mean, rstd, *vectors))


def _may_wait(given: ChannelNormCall) -> bool:
    """Whether torch takes such tensors, and a kernel reads them as they lie."""
    x, groups = given.x, given.groups
    optional = (given.weight, given.bias, given.running_mean, given.running_var)
    vectors = [vector for vector in optional if vector is not None]
    if any(map(is_foreign, (x, *vectors))) or not any(t.requires_grad for t in (x, *vectors)):
        return False
    if not x.is_floating_point() or x.dim() < 2 or x.layout is not torch.strided:
        return False
    # torch refuses one number a channel, or groups that do not divide the channels
    statistics = x.shape[0] * groups if groups else x.shape[1]
    divides = not groups or x.shape[1] % groups == 0
    return x.numel() > statistics and divides and _fit(x, vectors) and _are_plain(given)


def _fit(x: Tensor, vectors: list[Tensor]) -> bool:
    dtypes = {vector.dtype for vector in vectors}
    known = dtypes <= {x.dtype} or (x.dtype.itemsize == 2 and dtypes == {torch.float32})
    return known and all(vector.shape == (x.shape[1],) for vector in vectors)


def _are_plain(given: ChannelNormCall) -> bool:
    x = given.x
    last = _CHANNELS_LAST.get(x.dim()) if not given.groups else None
    if not (x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))):
        return False
    tracks = (given.running_mean is None) == (given.running_var is None)
    return tracks and isinstance(given.eps, float) and isinstance(given.momentum, float)
