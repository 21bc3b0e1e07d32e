"""A value that a backward makes once for all nodes that saved what it is made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_engine: Any = torch.autograd.Variable._execution_engine


class SharedValue:
    """Held from the first node that asks for it until the last one, or until the backward ends: a backward of
    a part of the graph may not come to the others."""

    __slots__ = ("__weakref__", "_savers", "_value", "_waiting")

    def __init__(self) -> None:
        self._savers = self._waiting = 0
        self._value: Tensor | None = None

    def saved(self) -> None:
        """One more node will ask."""
        self._savers += 1
        self._waiting += 1

    def value(self, make: Callable[[], Tensor]) -> Tensor:
        """The value, for one of those that saved it."""
        found = self._value
        if found is None:
            found = make()
            if torch._C._current_graph_task_id() == -1:
                return found  # somebody looks at what is saved
            if self._waiting > 1:
                _engine.queue_callback(partial(_let_go, weakref.ref(self)))
        self._waiting -= 1
        # with retain_graph they all come again
        self._value = found if self._waiting > 0 else None
        if self._waiting <= 0:
            self._waiting = self._savers
        return found


def _let_go(of: weakref.ref[SharedValue]) -> None:
    shared = of()
    if shared is not None:
        shared._value, shared._waiting = None, shared._savers
