"""Who shares the memory of a deferred tensor, and which torch functions let somebody write into it.

Deferred tensors that would be views of each other, were their values there, are computed each on its own. A
write into one of them must not be lost on the others: it is refused where it is noticed at once, and where
it comes through a view of torch's own, the others are refused when they are read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, without its import
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lowmem_patch.nn.op import Arguments, Named
from lowmem_patch.tracing.op_roles import REARRANGES, SELECTS, Role, function_name, names_with

MADE_OUTSIDE = (
    "lowmem_patch: a compiled function writes into logits, or takes a view of them, that were made outside "
    "of it or are read by an nn.CrossEntropyLoss() of its own: write before, compile the model with it, or "
    "call F.cross_entropy"
)


class SharedMemory:
    """The memory of tensors without values."""

    def __init__(self) -> None:
        self._members: Any = WeakIdKeyDictionary()
        # views of torch's own that were given, through which somebody may write, and their versions then
        self.watched: list[tuple[Tensor, int]] = []

    @classmethod
    def of(cls, h: Any) -> SharedMemory:
        """That in which ``h`` lies."""
        if h._memory is None:
            cls().add(h)
        memory: SharedMemory = h._memory
        return memory

    def add(self, h: Any) -> None:
        h._memory = self
        self._members[h] = None

    def is_shared(self, h: Any) -> bool:
        """Whether somebody may write into the memory through another than ``h``."""
        return bool(self.watched) or self._has_others(h)

    def _has_others(self, h: Any) -> bool:
        return any(one is not h for one in self._members)

    def refuse_write(self, h: Any) -> None:
        """Raise where others are held, which would not see it."""
        if self._has_others(h):
            raise RuntimeError(h.op.written_view)

    def refuse_read(self, h: Any) -> None:
        """Raise where somebody wrote through a view that torch made of another one."""
        for watch, version in self.watched:
            if watch._version != version and watch is not h._watch:
                raise RuntimeError(h.op.written_view)

    @_disable_dynamo  # which would compile it as a frame of its own, behind a break of a graph
    def watch(self, h: Any) -> None:
        """``h`` gives a view of its values to torch; below autograd."""
        if h._watch is None and not h.held:
            # a tensor without values that has the version of h, which may be gone when somebody writes
            below: Any = torch._C._SetExcludeDispatchKeyGuard
            with (
                below(torch._C.DispatchKey.ADInplaceOrView, False),
                torch._C._DisableTorchDispatch(),
            ):
                h._watch = torch.ops.aten.detach(h)
            self.watched.append((h._watch, h._watch._version))


def written_arguments(func: Any, args: Arguments, kwargs: Named, kind: type[Any]) -> list[Any]:
    """The tensors of a kind into which an operator writes; raises where others would not see it."""
    schema = func._schema
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    items = [
        given.get(one.name)
        for one in schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    ]
    written: list[Any] = [item for item in tree_leaves(items) if isinstance(item, kind)]
    for item in written:
        if item._memory is not None:
            item._memory.refuse_write(item)
    return written


@cache
def effects_of(func: Any) -> tuple[bool, bool]:
    """Whether an operator writes into an argument, and whether it may return a view of one."""
    schema = func._schema
    return schema.is_mutable, any(one.alias_info is not None for one in schema.returns)


@cache
def reshapes(func: Any) -> bool:
    """Whether an operator gives its argument another shape or other strides (``transpose_``), and writes no
    values: a tensor without storage needs that done to itself as well."""
    return torch.Tag.inplace_view in func.tags


def open_written(func: Any, args: Arguments, kwargs: Named, kind: type[Any]) -> None:
    """Open the tensors of a kind into which a torch function writes, or of which it may give a view."""
    name, writes = function_name(func), True
    items: Any = ()
    if "out" in kwargs:
        items = kwargs["out"]
    elif _writes(name) or kwargs.get("inplace") or any(one is True for one in args[1:]):
        items = args[0] if args else kwargs
    elif name in _VIEWS:
        items, writes = (args, kwargs), False
    for item in tree_leaves(items):
        if isinstance(item, kind):
            item.open(writes)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in _OPERATORS
    return name.endswith("_") and name not in _NO_VALUES


_NAMES = frozenset(dir(Tensor))
_NO_VALUES = frozenset(("requires_grad_", "share_memory_", "rename_"))
_OPERATORS = {name for name in _NAMES if name.startswith("__i") and f"__{name[3:]}" in _NAMES}
_OPERATORS |= names_with(Role.WRITE)


def _gives_view(name: str) -> bool:
    """Whether a function gives a view, by torch's own signatures."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any(one.alias_info is not None for schema in schemas for one in schema.returns)


_VIEWS = names_with(REARRANGES | SELECTS | Role.CAST | Role.TRANSFER | Role.UNTRACKED | Role.ALIAS)
_VIEWS |= {
    name for name in {*_NAMES, *dir(torch)} if not name.startswith("_") and _gives_view(name)
}
