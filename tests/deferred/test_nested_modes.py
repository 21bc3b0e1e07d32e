"""Modes around nested forwards: torch asks one of them, which asks the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowmem_patch.nn.modes import ForwardMode


class Notes(ForwardMode):
    """Writes down what it is asked for."""

    names = frozenset(("sin", "cos", "add"))

    def __init__(self, name: str, notes: list[tuple[str, str]]) -> None:
        super().__init__(nn.Identity())
        self.name, self.notes = name, notes

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.notes.append((self.name, func.__name__))
        return NotImplemented


class Foreign(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def depth() -> int:
    return torch._C._len_torch_function_stack()


def test_each_mode_is_asked_and_one_is_on_torchs_stack() -> None:
    notes: list[tuple[str, str]] = []
    x = torch.ones(2)
    with Notes("outer", notes):
        with Notes("inner", notes):
            assert depth() == 1
            torch.sin(x)
        assert notes == [("inner", "sin"), ("outer", "sin")]
        notes.clear()
        torch.cos(x)
        assert notes == [("outer", "cos")] and depth() == 1
    assert depth() == 0


def test_an_error_brings_the_outer_mode_back() -> None:
    notes: list[tuple[str, str]] = []
    x, other = torch.ones(2), torch.ones(3)
    with Notes("outer", notes):
        with pytest.raises(RuntimeError, match="must match"), Notes("inner", notes):
            torch.add(x, other)
        notes.clear()
        torch.cos(x)
        assert notes == [("outer", "cos")]
    assert depth() == 0


def test_a_foreign_mode_between_stays_between() -> None:
    notes: list[tuple[str, str]] = []
    x = torch.ones(2)
    with Notes("outer", notes), Foreign(), Notes("inner", notes):
        assert depth() == 3
        torch.sin(x)
    assert notes == [("inner", "sin"), ("outer", "sin")]
    assert depth() == 0


def test_functions_that_no_mode_takes_are_called_at_once() -> None:
    class Others(Notes):
        names = frozenset(("tanh",))

        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.notes.append(("called", func.__name__))
            return super().call(func, args, kwargs)

    notes: list[tuple[str, str]] = []
    x = torch.ones(2)
    with Notes("outer", notes), Others("inner", notes):
        torch.exp(x)
        torch.tanh(x)
        torch.sin(x)
    called = [("called", "tanh"), ("inner", "tanh"), ("called", "sin"), ("outer", "sin")]
    assert notes == called
