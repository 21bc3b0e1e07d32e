"""The calls of functions by which the value of a chain is made of its sources, and made again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_patch.nn.op import Arguments, Function, Named
from lowmem_patch.tracing.call_arguments import ElementwiseCall, as_plain, elementwise_call
from lowmem_patch.tracing.op_roles import Role, function_name, role_of


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


class Value(NamedTuple):
    """What a step makes; ``strides`` of None: contiguous."""

    shape: torch.Size
    strides: tuple[int, ...] | None
    dtype: torch.dtype


class _Given(NamedTuple):
    """What matters of a tensor for a call of an elementwise function; ``maker`` as of `elementwise_call`."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    maker: str | None


class _Number(NamedTuple):
    """A number, a dtype or a word; 1, 1.0 and True are three."""

    kind: type
    value: Any


class Described(NamedTuple):
    """The arguments of a call, in which only what matters of tensors is left, so that what follows from that
    is found once."""

    args: tuple[_Given | _Number, ...]
    kwargs: tuple[tuple[str, _Given | _Number], ...]

    @staticmethod
    def of(
        args: Arguments, kwargs: Named, maker: Callable[[Tensor], str | None] = lambda tensor: None
    ) -> Described:
        def one(item: Any) -> _Given | _Number:
            if isinstance(item, Tensor):
                return _Given(item.shape, item.stride(), item.dtype, maker(item))
            return _Number(type(item), as_plain(item))

        named = tuple((name, one(item)) for name, item in kwargs.items()) if kwargs else ()
        return Described(tuple(map(one, args)), named)

    def with_tensors(self, make: Callable[[_Given], Tensor]) -> tuple[Arguments, Named]:
        """The arguments, with tensors that ``make`` makes."""

        def one(item: _Given | _Number) -> Any:
            return item.value if isinstance(item, _Number) else make(item)

        return tuple(map(one, self.args)), {name: one(item) for name, item in self.kwargs}


def has_strides(given: Any) -> bool:
    """Whether this is an ordinary tensor in memory, or none."""
    if not isinstance(given, Tensor):
        return True
    return given.layout is torch.strided and not given.is_nested


def _without_values(given: _Given) -> Tensor:
    return torch.empty_strided(given.shape, given.strides, dtype=given.dtype, device="meta")


@lru_cache(maxsize=4096)
def call_of(name: str, described: Described) -> ElementwiseCall | None:
    """The call as it is compared with those that are planned."""
    makers: dict[int, str | None] = {}

    def make(given: _Given) -> Tensor:
        tensor = _without_values(given)
        makers[id(tensor)] = given.maker
        return tensor

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        args, kwargs = described.with_tensors(make)
        return elementwise_call(name, args, kwargs, lambda tensor: makers[id(tensor)])


@lru_cache(maxsize=4096)
def laid_out(func: Function, described: Described) -> tuple[torch.Size, tuple[int, ...]] | None:
    """The shape and the strides of a function's result, which torch alone knows: it is run on tensors without
    values. None where torch refuses the call."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        args, kwargs = described.with_tensors(_without_values)
        try:
            made: Tensor = func(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError):
            return None
    return made.shape, made.stride()


class _Like(NamedTuple):
    """What matters of a tensor for a result's dtype; ``dimensions`` is at most 1."""

    dtype: torch.dtype
    dimensions: int


@lru_cache(maxsize=4096)
def _dtype_of(
    func: Function, args: Arguments, kwargs: Arguments, device: torch.device, autocast: Autocast
) -> torch.dtype:
    def one(given: Any) -> Any:
        if isinstance(given, type):
            return given(1)
        if isinstance(given, _Like):
            return torch.ones((1,) * given.dimensions, dtype=given.dtype, device=device)
        return given

    with torch.no_grad(), torch._C.DisableTorchFunction(), under(autocast):
        made: Tensor = func(*map(one, args), **{name: one(given) for name, given in kwargs})
    return made.dtype


@lru_cache(maxsize=4096)
def value_made(
    func: Function, described: Described, device: torch.device, autocast: Autocast
) -> Value | None:
    """What a function makes; its dtype is that of a run on one element. None where torch refuses the call."""

    def matters(item: _Given | _Number) -> Any:
        if isinstance(item, _Given):
            return _Like(item.dtype, min(len(item.shape), 1))
        return item.kind if item.kind in (int, float) else item.value

    laid = laid_out(func, described)
    if laid is None:
        return None
    if role_of(function_name(func)).has(Role.GATED_HALVES):  # of one element there are no halves
        return Value(*laid, next(one.dtype for one in described.args if isinstance(one, _Given)))
    named = tuple((name, matters(item)) for name, item in described.kwargs)
    args = tuple(map(matters, described.args))
    return Value(*laid, _dtype_of(func, args, named, device, autocast))
