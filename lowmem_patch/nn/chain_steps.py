"""The calls of functions by which the value of a chain is made of its sources, and made again."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_patch.nn.op import Arguments, Function, Named


class Leaf:
    """The place of a source among the arguments of steps."""


_NUMBERS = itertools.count()


class Step:
    """A call of a function, whose tensors are other steps and leaves.

    Attributes:
        before: the steps and leaves whose values it takes, each once.
        number: counts the calls.
    """

    def __init__(self, func: Function, args: Arguments, kwargs: Named) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        given = (*args, *kwargs.values()) if kwargs else args
        self.before = tuple({item for item in given if isinstance(item, (Step, Leaf))})
        self.number = next(_NUMBERS)

    def run(self, values: dict[Any, Tensor]) -> Tensor:
        # not `item in values`: an argument may be a list, which has no hash
        args = [values[item] if isinstance(item, (Step, Leaf)) else item for item in self.args]
        kwargs = {
            name: values[item] if isinstance(item, (Step, Leaf)) else item
            for name, item in self.kwargs.items()
        }
        made: Tensor = self.func(*args, **kwargs)
        return made


def _in_order(last: Step) -> list[Step]:
    """The steps that lead to the last one, as they were called: autograd adds gradients up in this order."""
    found: set[Step] = set()
    pending: list[Any] = [last]
    while pending:
        step = pending.pop()
        if isinstance(step, Step) and step not in found:
            found.add(step)
            pending += step.before
    return sorted(found, key=attrgetter("number"))


def run(last: Step, values: dict[Any, Tensor]) -> Tensor:
    """The value of the last step, from those of the leaves; each value is let go after its last use."""
    steps = _in_order(last)
    last_use = {item: step for step in steps for item in step.before}
    for step in steps:
        values[step] = step.run(values)
        for item in step.before:
            if last_use[item] is step:
                del values[item]
    return values[last]


Autocast = tuple[str, torch.dtype | None]


def autocast_of(device: str) -> Autocast:
    """The device's type, and the dtype of its autocast where that is on."""
    enabled = torch.is_autocast_enabled(device)
    return device, torch.get_autocast_dtype(device) if enabled else None


_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


def under(autocast: Autocast) -> AbstractContextManager[Any]:
    """A context with this autocast."""
    device, dtype = autocast
    if autocast_of(device) == autocast:
        return _AS_IT_IS
    return torch.autocast(device, dtype, enabled=dtype is not None)


class _Like(NamedTuple):
    """What matters of a tensor for a result's dtype; ``dimensions`` is at most 1."""

    dtype: torch.dtype
    dimensions: int


def _key(given: Any) -> Any:
    """What matters of an argument: of a number its type."""
    if isinstance(given, Tensor):
        return _Like(given.dtype, min(given.dim(), 1))
    return type(given) if isinstance(given, (int, float)) else given


@lru_cache(maxsize=4096)
def _dtype_of(
    func: Function, args: Arguments, kwargs: Arguments, device: torch.device, autocast: Autocast
) -> torch.dtype:
    """The dtype of a function's result, which torch alone knows: it is run on one element."""

    def one(given: Any) -> Any:
        if isinstance(given, type):
            return given(1)
        if isinstance(given, _Like):
            return torch.ones((1,) * given.dimensions, dtype=given.dtype, device=device)
        return given

    with torch.no_grad(), torch._C.DisableTorchFunction(), under(autocast):
        made: Tensor = func(*map(one, args), **{name: one(given) for name, given in kwargs})
    return made.dtype


def dtype_of(
    func: Function, args: Arguments, kwargs: Named, device: torch.device, autocast: Autocast
) -> torch.dtype:
    """The dtype of a function's result."""
    named = tuple((name, _key(given)) for name, given in kwargs.items())
    return _dtype_of(func, tuple(map(_key, args)), named, device, autocast)


class _Laid(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=4096)
def _laid_out(
    func: Function, args: Arguments, kwargs: Arguments
) -> tuple[torch.Size, tuple[int, ...]] | None:
    def empty(given: Any) -> Any:
        if not isinstance(given, _Laid):
            return given
        return torch.empty_strided(given.shape, given.strides, dtype=given.dtype, device="meta")

    try:
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            made: Tensor = func(*map(empty, args), **{name: empty(given) for name, given in kwargs})
    except (RuntimeError, TypeError, IndexError):
        return None
    return made.shape, made.stride()


def laid_out(
    func: Function, args: Arguments, kwargs: Named
) -> tuple[torch.Size, tuple[int, ...]] | None:
    """The shape and the strides of a function's result, which torch alone knows: it is run on tensors without
    values. None where torch refuses the call."""

    def laid(given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        return _Laid(given.shape, given.stride(), given.dtype)

    named = tuple((name, laid(given)) for name, given in kwargs.items())
    return _laid_out(func, tuple(map(laid, args)), named)
