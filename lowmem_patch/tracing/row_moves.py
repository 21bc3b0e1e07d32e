"""Which torch functions move whole rows: the last dimension stays last and whole.

A row move commutes with everything that works on each row alone (a norm over the last dimension, an
elementwise activation, a Linear). The trace follows a norm's output through such moves, and a
deferred op is moved along by applying the move to its inputs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.tracing.call_arguments import argument
from lowmem_patch.tracing.op_roles import Role, function_name, names_with

_Arguments = tuple[Any, ...]
_Named = dict[str, Any]


def moves_rows(
    func: Callable[..., Any], args: _Arguments, kwargs: _Named, source: Tensor, output: Any
) -> bool:
    """Whether ``output = func(*args, **kwargs)`` only moves, drops or repeats whole rows of ``source``.

    ``source`` must be ``args[0]``. A pad counts as a move only when it adds nothing: padded rows are
    zeros made after the norm, which do not commute with its beta.
    """
    ndim = source.dim()
    leaves_rows = _LEAVES_ROWS.get(function_name(func))
    if leaves_rows is None or not ndim:
        return False
    # loops, not all(): this runs at each move in each step
    for one in output if isinstance(output, (tuple, list)) else (output,):
        if not isinstance(one, Tensor) or not one.dim() or one.shape[-1] != source.shape[-1]:
            return False
        if one.dtype != source.dtype:
            return False  # another reading of the same bits: view(torch.int32)
    return leaves_rows(args, kwargs, ndim)


def _dims(args: _Arguments, kwargs: _Named) -> tuple[int, ...]:
    """Trailing integers, given as varargs or as one sequence: ``permute(0, 1)``, ``permute((0, 1))``."""
    value = kwargs.get("dims", args[1:])
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], (tuple, list)):
        value = value[0]
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


# Each gets (args, kwargs, dimensions of the source), and knows that no row has changed its length.


def _transpose(args: _Arguments, kwargs: _Named, ndim: int) -> bool:
    first, second = argument(args, kwargs, 1, "dim0", -1), argument(args, kwargs, 2, "dim1", -1)
    return first not in (ndim - 1, -1) and second not in (ndim - 1, -1)


def _roll(args: _Arguments, kwargs: _Named, ndim: int) -> bool:
    dims = argument(args, kwargs, 2, "dims", ())
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return bool(dims) and not any(dim in (ndim - 1, -1) for dim in dims)


def _index(args: _Arguments, kwargs: _Named, ndim: int) -> bool:
    items = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
    # tensors, lists, arrays and masks may take single elements: only plain indices are followed
    plain = (slice, int, torch.SymInt, type(None), type(Ellipsis))
    if not all(isinstance(item, plain) and not isinstance(item, bool) for item in items):
        return False
    missing = [slice(None)] * (
        ndim - sum(item is not None and item is not Ellipsis for item in items)
    )
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items = [*items[:at], *missing, *items[at + 1 :]]
    return isinstance(items[-1], slice) and items[-1] == slice(None)


_IN_ORDER = Role.RESHAPE | Role.UNIT_DIMENSION | Role.CONTIGUOUS | Role.CLONE | Role.EXPAND
_BY_ROLE: tuple[tuple[Role, Callable[[_Arguments, _Named, int], bool]], ...] = (
    (_IN_ORDER, lambda args, kwargs, ndim: True),
    (Role.PERMUTE, lambda args, kwargs, ndim: _dims(args, kwargs)[-1] in (ndim - 1, -1)),
    (Role.TRANSPOSE, _transpose),
    (Role.ROLL, _roll),
    (Role.FLIP, lambda args, kwargs, ndim: not {ndim - 1, -1}.intersection(_dims(args, kwargs))),
    (Role.SPLIT, lambda args, kwargs, ndim: argument(args, kwargs, 2, "dim", 0) not in (ndim - 1, -1)),
    (Role.SELECT, lambda args, kwargs, ndim: argument(args, kwargs, 1, "dim", 0) not in (ndim - 1, -1)),
    (Role.INDEX, _index),
    (Role.PAD, lambda args, kwargs, ndim: not any(argument(args, kwargs, 1, "pad", (1,)))),
)  # fmt: skip
_LEAVES_ROWS = {name: leaves_rows for role, leaves_rows in _BY_ROLE for name in names_with(role)}
