"""One copy of a Linear's input or weight: casts and gathered rows wait, so that autograd saves one tensor.

All are forward hooks, so that no layer is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler
from lowmem_patch.nn.context import autocast_dtype, is_foreign, needs_gradient
from lowmem_patch.nn.deferred_ops import Matrix, Saved

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
    if in_compiler() or place >= len(places):
        return None
    x = given[places[place]]
    if is_foreign(x) or not needs_gradient(x):
        return None
    given[places[place]] = _SAVED.of(x, passing=True)
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))
