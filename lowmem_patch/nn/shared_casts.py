"""One cast of a float32 tensor for all Linears that read it under autocast.

Autocast makes a cast for each, and each saves its own. A module around the Linears holds the casts while its
forward runs, and no longer: the next forward, a block that runs again and a captured graph make their own.
The Linears get theirs inside of their forward, where no hook sees it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, packer
from lowmem_patch.nn.context import autocast_dtype, is_foreign, trains_here
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.own import Own, give_forward, give_forward_around, inner_forward
from lowmem_patch.nn.watched import Watched


class _Cast(torch.autograd.Function):
    """A cast whose result was made before: only the gradient's cast is of its own, so that the gradients of
    several are added up in the dtype of ``x``, as those of casts are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None if gradient is None else gradient.to(ctx.dtype), None


class _Made(NamedTuple):
    of: weakref.ref[Tensor]
    state: tuple[Any, ...]
    low: Tensor


class _Running(threading.local):
    """The casts that the innermost such forward of this thread holds, by the id of what was cast."""

    casts: dict[int, _Made] | None = None
    packer: Any = None


_RUNNING = _Running()


def share_casts(module: nn.Module, linears: list[nn.Module]) -> None:
    """Let ``linears``, which the forward of ``module`` calls, share casts; so do LoRA layers within."""
    give_forward_around(module, _holding_casts)
    for linear in linears:
        give_forward(linear, _forward_of_cast)


def _holding_casts(module: nn.Module, given: Own | None, /, *args: Any, **kwargs: Any) -> Any:
    forward = inner_forward(module, given)
    if in_compiler() or not trains_here():
        return forward(*args, **kwargs)
    outer = _RUNNING.casts, _RUNNING.packer
    _RUNNING.casts, _RUNNING.packer = {}, packer()
    try:
        return forward(*args, **kwargs)
    finally:
        _RUNNING.casts, _RUNNING.packer = outer


def _forward_of_cast(linear: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The class's forward, of the cast that autocast would make."""
    if not (in_compiler() or _RUNNING.casts is None) and len(args) == 1 and not kwargs:
        x = args[0]
        if not is_foreign(x) and x.dtype == torch.float32 and not x.is_meta:
            low = autocast_dtype(x.device.type, x.dtype)
            if low is not None and low.itemsize < x.dtype.itemsize:
                args = (_shared(x, low) if _is_shareable(x) else x,)
    return type(linear).forward(linear, *args, **kwargs)


def cast_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, in the same memory for all that ask for it in one forward that holds casts."""
    if in_compiler() or _RUNNING.casts is None or not _is_shareable(x):
        return x.to(dtype)
    return _shared(x, dtype)


def holds_casts() -> bool:
    """Whether a forward that holds casts is running."""
    return _RUNNING.casts is not None


def _is_shareable(x: Tensor) -> bool:
    """Whether a cast may be held. Autocast itself holds those of parameters; what a checkpoint runs again has
    none that was made outside of it."""
    if isinstance(x, (Deferred, Watched)) or x.is_inference() or not trains_here():
        return False
    of_parameter = x.requires_grad and x.grad_fn is None
    return not of_parameter and packer() == _RUNNING.packer


def _shared(x: Tensor, dtype: torch.dtype) -> Tensor:
    casts = _RUNNING.casts
    assert casts is not None
    # another stream might read it too early
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else None
    known, state = casts.get(id(x)), (x._version, dtype, stream)
    if known is None or known.of() is not x or known.state != state:
        known = casts[id(x)] = _Made(weakref.ref(x), state, x.detach().to(dtype))
    cast: Tensor = _Cast.apply(x, known.low)  # type: ignore[no-untyped-call]
    return cast
