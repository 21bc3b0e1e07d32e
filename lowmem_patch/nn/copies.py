"""One copy of a Linear's input: casts of it wait or are shared, so that autograd keeps one tensor.

All are forward hooks, so that no layer is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.nn.context import autocast_dtype, has_backward_hooks, needs_gradient
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_ops import Kept, KeptMatrix
from lowmem_patch.nn.joint import follow_joint
from lowmem_patch.nn.narrow import attached_copy

__all__ = [
    "is_own_hook", "keep_matrix", "keep_weight", "release_input", "show_value", "use_copy", "use_value",
]  # fmt: skip


def use_copy(module: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a Linear: read the attached copy, which is what autocast would make."""
    if torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
        return None
    copy = attached_copy(args[0])
    if copy is None or not needs_gradient(copy):
        return None
    if not torch.is_autocast_enabled(copy.device.type):
        return None
    if args[0]._backward_hooks or args[0].retains_grad:  # the whole gradient is waited for there
        return None
    # torch's own node costs less time than ours, which only a frozen weight is worth
    plain = module.weight.requires_grad or has_backward_hooks(module)
    return (copy if plain else Kept(copy), *args[1:])


def keep_weight(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a frozen Linear: under autocast it keeps its weight, and no narrow copy of it,
    for its input's gradient."""
    if torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
        return None
    if has_backward_hooks(module):
        return None
    if needs_gradient(args[0]) and torch.is_autocast_enabled(args[0].device.type):
        return (Kept(args[0]), *args[1:])
    return None


def keep_matrix(module: nn.Module, args: tuple[Any, ...], output: Any) -> KeptMatrix | None:
    """Forward hook of a softmax: under autocast the matmul behind it keeps no copy of the float32 output."""
    if torch.compiler.is_compiling() or not isinstance(output, Tensor):
        return None
    narrow = autocast_dtype(output.device.type, output.dtype)
    if narrow is None or not needs_gradient(output) or has_backward_hooks(module):
        return None
    return KeptMatrix(output) if output.dtype.itemsize > narrow.itemsize else None


def use_value(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a base layer with kernels of its own (quantised): it gets the plain tensor."""
    if args and isinstance(args[0], Deferred):
        return (args[0].value(), *args[1:])
    return None


def show_value(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a module to which a deferred tensor may be given: torch hangs its backward hooks
    on tensors alone."""
    if has_backward_hooks(module) and any(isinstance(arg, Deferred) for arg in args):
        return tuple(value_of(arg) for arg in args)
    return None


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is one of the package's, and not a user's."""
    return hook in (
        follow_joint, keep_matrix, keep_weight, show_value, use_copy, use_value,
    )  # fmt: skip


def release_input(module: nn.Module) -> None:
    """Take these hooks off again."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if is_own_hook(hook):
                del hooks[key]
