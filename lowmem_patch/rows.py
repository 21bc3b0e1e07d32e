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

__all__ = ["function_name", "moves_rows", "pads"]


def function_name(func: Callable[..., Any]) -> str:
    """``torch.roll`` and ``Tensor.roll`` -> ``roll``; a property's getter -> the property's name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any
) -> Any:
    return kwargs[name] if name in kwargs else (args[index] if len(args) > index else default)


def _sequence(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[int, ...]:
    """Trailing integers, given as varargs or as one sequence: ``permute(0, 1)``, ``permute((0, 1))``."""
    value = kwargs.get(name, args[1:])
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], (tuple, list)):
        value = value[0]
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _getitem(ndim: int, index: Any) -> bool:
    items = list(index) if isinstance(index, tuple) else [index]
    # tensors, lists, arrays and masks may take single elements: only plain indices are followed
    plain = (slice, int, torch.SymInt, type(None), type(Ellipsis))
    if not all(isinstance(item, plain) and not isinstance(item, bool) for item in items):
        return False
    missing = [slice(None)] * (
        ndim - sum(item is not None and item is not Ellipsis for item in items)
    )
    # no next(..., None): torch.compile of torch 2.6 does not know it
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    at = dots[0] if dots else len(items)
    items = [*items[:at], *missing, *items[at + 1 :]]
    return isinstance(items[-1], slice) and items[-1] == slice(None)


_SAME_ORDER = frozenset(
    (
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "clone",
        "expand",
    )
)


def moves_rows(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Tensor,
    output: Any,
) -> bool:
    """Whether ``output = func(*args, **kwargs)`` only moves, drops or repeats whole rows of ``source``.

    ``source`` must be ``args[0]``. A pad counts as a move only when it adds nothing: padded rows are
    zeros made after the norm, which do not commute with its beta.
    """
    name, ndim = function_name(func), source.dim()
    if not ndim:
        return False
    # loops, not all(): this runs at each move in each step
    for one in output if isinstance(output, (tuple, list)) else (output,):
        if not isinstance(one, Tensor) or not one.dim() or one.shape[-1] != source.shape[-1]:
            return False
        if one.dtype != source.dtype:
            return False  # another reading of the same bits: view(torch.int32)
    last = (ndim - 1, -1)
    if name in _SAME_ORDER:
        return True  # memory order is kept, and so is the length of a row
    if name == "permute":
        return _sequence(args, kwargs, "dims")[-1] in last
    if name in ("transpose", "swapaxes", "swapdims"):
        return (
            _argument(args, kwargs, 1, "dim0", -1) not in last
            and _argument(args, kwargs, 2, "dim1", -1) not in last
        )
    if name == "roll":
        dims = _argument(args, kwargs, 2, "dims", ())
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        return bool(dims) and not any(dim in last for dim in dims)
    if name in ("chunk", "split", "tensor_split"):
        return _argument(args, kwargs, 2, "dim", 0) not in last
    if name in ("unbind", "select", "narrow"):
        return _argument(args, kwargs, 1, "dim", 0) not in last
    if name == "flip":
        return not any(dim in last for dim in _sequence(args, kwargs, "dims"))
    if name == "__getitem__":
        return _getitem(ndim, args[1])
    if name == "pad":
        return not any(_argument(args, kwargs, 1, "pad", (1,)))
    return False


def pads(func: Callable[..., Any]) -> bool:
    """Whether the function may add rows of zeros for some input sizes."""
    return function_name(func) in ("pad", "constant_pad_nd")
