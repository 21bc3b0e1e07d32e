"""One copy of a Linear's input or weight, so that autograd saves one tensor: casts and gathered rows wait, or
Linears that read one float32 tensor under autocast share its cast.

Autocast makes a cast for each of them, and each saves its own. A module around the Linears holds the casts
while its forward runs, and no longer: the next forward, a block that runs again and a captured graph make
their own. The Linears get theirs inside of their forward, where no hook sees it. All else are forward hooks:
no layer is replaced.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, packer
from lowmem_patch.nn.context import autocast_dtype, is_foreign, needs_gradient, trains_here
from lowmem_patch.nn.deferred_ops import Matrix, Saved
from lowmem_patch.nn.own import Own, give_forward, give_forward_around, inner_forward
from lowmem_patch.nn.watched import Watched

_SAVED, _MATRIX = Saved(), Matrix()


def keep_weight(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a frozen Linear: under autocast it saves its weight for its input's
    gradient, and no low-precision copy of it."""
    if in_compiler() or not args or is_foreign(args[0]):
        return None
    if needs_gradient(args[0]) and torch.is_autocast_enabled(args[0].device.type):
        return (_SAVED.of(args[0], passing=True), *args[1:])
    return None


def keep_matrix(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Forward hook of a softmax: under autocast the matmul behind it keeps no copy of the float32 output."""
    if in_compiler() or is_foreign(output):
        return None
    low = autocast_dtype(output.device.type, output.dtype)
    if low is None or not needs_gradient(output):
        return None
    return _MATRIX.of(output) if output.dtype.itemsize > low.itemsize else None


def keep_rows(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of experts: matmuls save the input at ``place`` among the tensors that they get, and
    not the rows that they gather of it."""
    given = [*args, *kwargs.values()]
    places = [number for number, item in enumerate(given) if isinstance(item, Tensor)]
    if place >= len(places):
        return None
    x = given[places[place]]
    if is_foreign(x) or not needs_gradient(x):
        return None
    given[places[place]] = _SAVED.of(x, passing=True)
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))


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
            if low is not None and low.itemsize < x.dtype.itemsize and _is_shareable(x):
                args = (_shared(x, low),)
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
    if isinstance(x, Watched) or x.is_inference() or not trains_here():
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
    cast: Tensor = _Cast.apply(x, known.low)  # type: ignore[no-untyped-call]  # of torch
    return cast
