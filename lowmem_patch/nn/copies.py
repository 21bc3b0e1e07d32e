"""One copy of a Linear's input: casts of it wait or are shared, so that autograd keeps one tensor.

All are forward pre-hooks, so neither the Linear nor the adapter layer is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.nn.deferred import Deferred, Kept, needs_gradient

__all__ = [
    "attach_copy", "is_own_hook", "keep_input", "lower_input", "release_input", "use_copy", "use_value",
]  # fmt: skip


# a narrow copy travels on the wide tensor that it copies, and lives as long as that does
_COPY = "_lowmem_patch_copy"


def attach_copy(tensor: Tensor, copy: Tensor) -> None:
    """Let Linears that read ``tensor`` under autocast find ``copy``, the same rounded."""
    setattr(tensor, _COPY, (copy, tensor._version))


def use_copy(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a Linear: read the attached copy, which is what autocast would make."""
    if torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
        return None
    attached = getattr(args[0], _COPY, None)
    if attached is None:
        return None
    copy, version = attached
    if not needs_gradient(copy) or not torch.is_autocast_enabled(copy.device.type):
        return None
    if args[0]._version != version:  # a hook wrote into the wide tensor since
        return None
    return (Kept(copy), *args[1:])


def keep_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of an adapter layer: its input becomes :class:`Kept`."""
    return (Kept(args[0]), *args[1:]) if _is_kept(args) else None


def lower_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """As :func:`keep_input`, and the adapter computes in the input's dtype."""
    return (Kept(args[0], lowers=True), *args[1:]) if _is_kept(args) else None


def _is_kept(args: tuple[Any, ...]) -> bool:
    """Whether an adapter that trains would keep the input; it need not have a gradient itself, as the
    first block's has none."""
    if not args or not isinstance(args[0], Tensor):
        return False
    return torch.is_grad_enabled() and args[0].is_floating_point()


def use_value(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a base layer with kernels of its own (quantised): it gets the plain tensor."""
    if args and isinstance(args[0], Deferred):
        return (args[0].value(), *args[1:])
    return None


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is one of these, and not a user's."""
    return hook in (keep_input, lower_input, use_copy, use_value)


def release_input(module: nn.Module) -> None:
    """Take these hooks off again."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if is_own_hook(hook):
            del module._forward_pre_hooks[key]
