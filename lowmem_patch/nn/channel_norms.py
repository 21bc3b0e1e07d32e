"""Norms over channels whose output waits, so that it and an activation of it are computed again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch.functional import (
    ActivationKind,
    ChannelNorm,
    activation,
    channel_statistics,
    recomputed_linear,
    without_grad,
)
from lowmem_patch.nn.context import is_foreign, unfreed
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, Unstored, value_of
from lowmem_patch.nn.modes import ForwardMode
from lowmem_patch.nn.op import Op, Projection, waits_for_gradient
from lowmem_patch.tracing.call_arguments import ChannelNormCall, channel_norm_call
from lowmem_patch.tracing.op_roles import Role, names_with


class NormedChannels(Op):
    """The output of a norm over channels, the sum of it and a residual, or an activation of one of both.

    The sources are x, mean, rstd, the norm's weight and bias, and the residual, those that there are.

    Args:
        norm: what is computed.
        summed: a residual that autograd saves anyway is added to the norm's output.
        reads: how many operators read the values before they are let go, as of `Activation`.
    """

    written_source = (
        "lowmem_patch: the input, the weight or the bias of a norm over channels, or what is added to it, "
        "was written in place, and the norm and its activation are computed of them again in backward: "
        "write after the backward, or leave this module alone (norms: keep)"
    )

    outlives = True

    def __init__(self, norm: ChannelNorm, reads: int = 1, summed: bool = False) -> None:
        self.norm, self.reads, self.summed = norm, reads, summed

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.norm.out_dtype

    def compute(self, *sources: Tensor) -> Tensor:
        return self.norm.value(*sources)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        return self.norm.gradients(dy, *sources)

    def activated(self, h: Any, kind: ActivationKind, reads: int, in_place: bool) -> Any:
        if self.norm.kind is not None or h.is_changed() or h.held or h._memory is not None:
            return h.copy_(activation(h.clone(), kind)) if in_place else NotImplemented
        op = NormedChannels(self.norm._replace(kind=kind), reads)
        op.past = (weakref.ref(h),)
        h.was_bypassed = not in_place
        # whoever holds the norm's output, as a hook may, reads there what the activation wrote
        return defer(op, h.sources, h if in_place else None)

    def plus(self, h: Deferred, other: Any) -> Any:
        return self._sum(h, other)

    def added(self, h: Deferred, other: Any) -> Any:
        return self._sum(h, other, into=h)

    def _sum(self, h: Any, other: Any, into: Any = None) -> Any:
        if not self._adds(h, other):
            known = isinstance(other, Unstored) and isinstance(other.op, NormedChannels)
            if into is None and known and other.op._adds(other, h) and not other.is_changed():
                return other.op._sum(other, h)
            return NotImplemented
        # a norm, or an activation of one, is computed again of what it saves; one more sum would be of
        # all the blocks before
        again = isinstance(other, Unstored) and isinstance(other.op, NormedChannels)
        if not again or other.op.norm.residual or other.is_changed() or waits_for_gradient(other):
            other = value_of(other)
        op = NormedChannels(self.norm._replace(residual=True), self.reads)
        op.past = (weakref.ref(h),)
        h.was_bypassed = into is None
        return defer(op, (*h.sources, unfreed(other)), into)

    def _adds(self, h: Any, other: Any) -> bool:
        """Whether the sum of it and another tensor can be computed of what it is computed of."""
        if not self.summed or h.held or h._memory is not None or not isinstance(other, Tensor):
            return False
        if other is h or (is_foreign(other) and not isinstance(other, Deferred)):
            return False
        like = (other.shape, other.dtype, other.device, other.stride())
        return like == (h.shape, h.dtype, h.device, h.stride()) and h.dtype == h.sources[0].dtype

    def was_computed(self, sources: tuple[Tensor, ...]) -> None:
        for source in sources:
            if isinstance(source, Unstored):
                source.let_go()

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        if to.adapter is not None or not to.weight.requires_grad:
            return super().linear(h, to, dtype)

        def again(*sources: Tensor, dtype: torch.dtype) -> Tensor:
            return self.norm.value(*sources).to(dtype)

        return recomputed_linear(h.plain(), again, h.sources, to.weight, to.bias, dtype)


class DeferChannelNorms(ForwardMode):
    """Gives deferred tensors where the module's forward calls a norm over channels."""

    names = names_with(Role.CHANNEL_NORM)

    def __init__(self, module: nn.Module, summed: bool) -> None:
        super().__init__(module)
        self.summed = summed

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = func in _NORMS and self.packs_alike()
        given = channel_norm_call(func.__name__, args, kwargs) if known else None
        made = None if given is None else deferred_norm(given, self.summed)
        return NotImplemented if made is None else made


_NORMS: tuple[Callable[..., Any], ...] = (F.batch_norm, F.group_norm, F.instance_norm)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def deferred_norm(given: ChannelNormCall, summed: bool) -> Deferred | None:
    """The norm's output; None where torch shall compute it, or say what is wrong. ``summed``: as of
    `NormedChannels`."""
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
    norm = ChannelNorm(given.groups, *has, False, None, dtype)
    return defer(NormedChannels(norm, summed=summed), (x, mean, rstd, *vectors))


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


def is_readable(x: Tensor, groups: int) -> bool:
    """Whether a kernel reads the input of a norm over channels as it lies in memory."""
    last = _CHANNELS_LAST.get(x.dim()) if not groups else None
    return x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))


def _are_plain(given: ChannelNormCall) -> bool:
    if not is_readable(given.x, given.groups):
        return False
    tracks = (given.running_mean is None) == (given.running_var is None)
    return tracks and isinstance(given.eps, float) and isinstance(given.momentum, float)
