"""A forward of our own on one module, in the place of its class's: how it goes again, and whose it is."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

__all__ = ["give_forward", "has_forward_of_others", "release_forward"]

_REPLICATE = "_replicate_for_data_parallel"


def give_forward(module: nn.Module, forward: Any) -> None:
    """Set a forward that holds its module: a bound method, or a partial with the module in front."""
    module.forward = forward
    setattr(module, _REPLICATE, partial(_replicate, module))


def _replicate(module: nn.Module) -> nn.Module:
    """As nn.DataParallel asks for it: what holds the module holds the replica there."""
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    for name, value in vars(module).items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
        elif isinstance(value, partial) and value.args[:1] and value.args[0] is module:
            replica.__dict__[name] = partial(value.func, replica, *value.args[1:])
    return replica


def has_forward_of_others(module: nn.Module, is_own: Callable[[Any], bool]) -> bool:
    """Whether somebody else gave this very module a forward."""
    forward = module.__dict__.get("forward")
    # the class's own is what a pickle or `release_forward` brings back
    of_class = getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not of_class and not is_own(forward)


def release_forward(module: nn.Module, is_own: Callable[[Any], bool]) -> None:
    """Take ours away, also where somebody put it aside to call it from a forward of his own."""
    for name, forward in list(vars(module).items()):
        if not is_own(forward):
            continue
        module.__dict__.pop(_REPLICATE, None)
        if name == "forward":
            del module.__dict__[name]
        else:
            module.__dict__[name] = types.MethodType(type(module).forward, module)
