"""One copy of a Linear's input or weight: casts and gathered rows wait, so that autograd saves one tensor.

All are forward hooks, so that no layer is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler
from lowmem_patch.nn.context import autocast_dtype, is_foreign, needs_gradient, trains_here
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.deferred_ops import Matrix, Saved
from lowmem_patch.nn.watched import Watched

_SAVED, _MATRIX = Saved(), Matrix()


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


def cast_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)`` in the same memory for all that ask for it, until ``x`` is written or freed.

    A parameter is cast each time: a fused optimizer writes into it without a trace.
    """
    if x.requires_grad and x.grad_fn is None:
        return x.to(dtype)
    known: Any = getattr(x, "_lowmem_cast", None)
    if known is None or known[0] != x._version or known[1].dtype != dtype:
        known = x._version, x.detach().to(dtype)
        x._lowmem_cast = known  # type: ignore[attr-defined]
    cast: Tensor = _Cast.apply(x, known[1])  # type: ignore[no-untyped-call]
    return cast


def share_cast(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of one of several Linears that read a tensor: under autocast they save one
    low-precision copy of it, and not each its own."""
    if in_compiler() or not args or not trains_here():
        return None
    x = args[0]
    if is_foreign(x) or isinstance(x, (Deferred, Watched)):
        return None
    low = autocast_dtype(x.device.type, x.dtype)
    if low is None or low.itemsize >= x.dtype.itemsize:
        return None
    return (cast_once(x, low), *args[1:])


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
    if in_compiler() or place >= len(places):
        return None
    x = given[places[place]]
    if is_foreign(x) or not needs_gradient(x):
        return None
    given[places[place]] = _SAVED.of(x, passing=True)
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))
