"""The calls of functions by which the value of a chain is made of its sources, and made again."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Leaf:
    """The place of a source among the arguments of steps."""


_NUMBERS = itertools.count()


class Step:
    """A call of a function, whose tensors are other steps and leaves; ``number`` counts the calls."""

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.number = next(_NUMBERS)

    @property
    def before(self) -> set[Any]:
        """Steps and leaves whose values it takes."""
        given = (*self.args, *self.kwargs.values())
        return {item for item in given if isinstance(item, (Step, Leaf))}

    def run(self, values: dict[Any, Tensor]) -> Tensor:
        def value(item: Any) -> Any:
            return values[item] if isinstance(item, (Step, Leaf)) else item

        kwargs = {name: value(item) for name, item in self.kwargs.items()}
        made: Tensor = self.func(*map(value, self.args), **kwargs)
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
    return sorted(found, key=lambda step: step.number)


def run(last: Step, values: dict[Any, Tensor]) -> Tensor:
    """The value of the last step, from those of the leaves; each value is let go after its last use."""
    steps = _in_order(last)
    uses = Counter(item for step in steps for item in step.before)
    for step in steps:
        values[step] = step.run(values)
        for item in step.before:
            uses[item] -= 1
            if not uses[item]:
                del values[item]
    return values[last]


Autocast = tuple[str, torch.dtype | None]


def autocast_of(device: str) -> Autocast:
    """The device's type, and the dtype of its autocast where that is on."""
    enabled = torch.is_autocast_enabled(device)
    return device, torch.get_autocast_dtype(device) if enabled else None


@contextlib.contextmanager
def under(autocast: Autocast) -> Iterator[None]:
    device, dtype = autocast
    if autocast_of(device) == autocast:
        yield
        return
    with torch.autocast(device, dtype, enabled=dtype is not None):
        yield
