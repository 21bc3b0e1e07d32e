"""One copy of an adapter layer's input: casts of it wait, so that autograd keeps the input alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowmem_patch.nn.deferred import Deferred, Kept, needs_gradient

__all__ = ["keep_input", "lower_input", "release_input", "use_value"]


def keep_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of an adapter layer: its input becomes :class:`Kept`."""
    if args and isinstance(args[0], Tensor) and needs_gradient(args[0]):
        return (Kept(args[0]), *args[1:])
    return None


def lower_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """As :func:`keep_input`, and the adapter computes in the input's dtype."""
    if args and isinstance(args[0], Tensor) and needs_gradient(args[0]):
        return (Kept(args[0], lowers=True), *args[1:])
    return None


def use_value(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a base layer with kernels of its own (quantised): it gets the plain tensor."""
    if args and isinstance(args[0], Deferred):
        return (args[0].value(), *args[1:])
    return None


def release_input(module: nn.Module) -> None:
    """Take these hooks off again."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (keep_input, lower_input, use_value):
            del module._forward_pre_hooks[key]
