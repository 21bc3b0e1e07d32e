"""Saved bytes: what autograd holds after a forward, exactly, on any device (also fake tensors).

Counted are unique storages: a tensor that ten ops save, or that ten views show, counts once.
Parameters and buffers do not count; low-precision copies of weights, which autocast makes (for
frozen weights too), are reported apart because they do not grow with the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SavedBytes", "module_stack", "saved_bytes", "storage_key"]


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage behind a tensor, the same for all its views; valid while it lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclasses.dataclass
class SavedBytes:
    """Bytes that autograd holds.

    Attributes:
        activations: bytes of unique storages that are neither parameters, buffers nor weight copies.
        weight_copies: bytes of copies of parameters (casts under autocast) held for backward.
        by_module: activation bytes by the path of the innermost module that saved a storage first.
        own: activation bytes by module path, of storages which that module alone saved.
    """

    activations: int = 0
    weight_copies: int = 0
    by_module: dict[str, int] = dataclasses.field(default_factory=dict)
    own: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.activations + self.weight_copies


@contextlib.contextmanager
def module_stack(model: nn.Module) -> Iterator[list[str]]:
    """Names of the modules that are running, innermost last, while a forward of ``model`` runs."""
    stack: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks

        def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


# torch ships no types for this class; Any says so once
_DispatchMode: Any = TorchDispatchMode


class _WeightCopies(_DispatchMode):  # type: ignore[misc]  # a base without types
    """Remembers the storages that hold a copy of a parameter (a cast, a clone)."""

    _COPIES = frozenset(
        (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.copy.default)
    )

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.copies: set[int] = set()
        self.keep_alive: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in self._COPIES and isinstance(args[0], Tensor):
            source = storage_key(args[0])
            if source in self.weights or source in self.copies:
                self.copies.add(storage_key(output))
                self.keep_alive.append(output)
        return output


@contextlib.contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count what autograd saves while the context is open; read the result after it closed.

    Example:
        >>> with saved_bytes(model) as saved:
        ...     loss = model(**batch).loss
        >>> saved.activations
    """
    weights = {storage_key(t) for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}
    savers: dict[int, dict[str, None]] = {}
    keep_alive: list[Tensor] = []
    result = SavedBytes()
    copies = _WeightCopies(weights)
    with contextlib.ExitStack() as contexts:
        stack = contexts.enter_context(module_stack(model))

        def pack(tensor: Tensor) -> Tensor:
            key = storage_key(tensor)
            if key not in weights:
                if key not in sizes:
                    sizes[key] = tensor.untyped_storage().nbytes()
                    keep_alive.append(tensor.detach())
                savers.setdefault(key, {})[stack[-1] if stack else ""] = None
            return tensor

        contexts.enter_context(
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        )
        contexts.enter_context(copies)
        yield result
    for key, size in sizes.items():
        if key in copies.copies:
            result.weight_copies += size
            continue
        names = list(savers[key])
        result.activations += size
        result.by_module[names[0]] = result.by_module.get(names[0], 0) + size
        if len(names) == 1:
            result.own[names[0]] = result.own.get(names[0], 0) + size
