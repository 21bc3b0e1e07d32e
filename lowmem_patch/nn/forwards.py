"""A forward of our own on one module, in the place of its class's: how it goes again, and whose it is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["has_forward_of_others", "release_forward"]


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
        if name == "forward":
            del module.__dict__[name]
        else:
            module.__dict__[name] = types.MethodType(type(module).forward, module)
