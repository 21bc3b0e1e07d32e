"""Deferred tensors of which a compiler sees the shape alone, and which leave its graph as deferred tensors.

In a compiled graph one stands for its recipe: known readers read the sources, and any other function gets the
values, computed there. Where one leaves the graph, the compiler returns what it saw (one number, expanded),
and sets the attributes of this class on it once more. Setting the recipe makes it the tensor that eager code
would have deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import (
    _disable_dynamo,
)  # as torch.compiler.disable, without its import of the compiler

from lowmem_patch.functional import in_compiler
from lowmem_patch.nn.deferred import READERS, Deferred, Op, Unstored, defer

__all__ = ["Traced", "trace"]


class Traced(Deferred):
    """A deferred tensor in a compiled graph; made by `trace`.

    The recipe is (class of the op, its arguments, the sources, the values after a write in place or None).
    """

    @_disable_dynamo  # torch.compiler.disable, without its import of the compiler, which would compile this
    def _leave(self, recipe: Any) -> None:
        kind, arguments, sources, written = recipe
        swap: Any = torch.utils.swap_tensors
        if written is not None:
            swap(self, written.view_as(written))
            return
        op = kind(*arguments)
        swap(self, defer(op, sources))
        op.deferred(self)

    recipe: Any = property(None, _leave)  # a compiler reads what it was set to

    @property
    def op(self) -> Op:  # type: ignore[override]  # an attribute elsewhere
        made: Op = self.recipe[0](*self.recipe[1])
        return made

    @property
    def sources(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # likewise
        found: tuple[Tensor, ...] = self.recipe[2]
        return found

    def is_changed(self) -> bool:
        return self.recipe[3] is not None

    def plain(self) -> Tensor:
        written = self.recipe[3]
        value: Tensor = self.op.compute(*self.sources) if written is None else written
        return value

    def detached(self) -> Tensor:
        return self.plain().detach()


def trace(kind: type[Op], arguments: tuple[Any, ...], sources: tuple[Tensor, ...]) -> Deferred:
    """A deferred tensor of the op ``kind(*arguments)``, in a compiled graph."""
    op = kind(*arguments)
    if _builds_criterion():
        seen = op.compute(*sources)  # which the compiler drops where nobody reads it
    else:
        seen = sources[0].detach().new_full((), torch.nan, dtype=op.dtype(sources))
        seen = seen.expand(op.shape(sources))
    h: Any = seen.as_subclass(Traced)
    h.recipe, h._bypassed = (kind, arguments, sources, None), False
    return h  # type: ignore[no-any-return]  # as_subclass has no types


def _builds_criterion() -> bool:
    """Whether code that is being compiled makes an `nn.CrossEntropyLoss`: the compiler has its own function
    in the place of that, which reads what the compiler saw."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow, and there by now

    frame: Any = InstructionTranslator.current_tx().output.current_tx
    while frame is not None:
        if nn.CrossEntropyLoss.__name__ in frame.f_code.co_names:
            return True
        frame = frame.parent
    return False


# torch.compiler.assume_constant_result, without its import of the compiler
_builds_criterion._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's mark


def _write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """From here on the values are what was written."""
    h = args[0] if args else None
    if isinstance(h, Unstored):
        if in_compiler():
            raise RuntimeError(_OUTSIDE)  # the compiler leaves this to eager code
        h.op.refuse_write(h)
    if not isinstance(h, Traced):
        return NotImplemented
    if not h.is_changed():
        h.op.refuse_write(h)
    value = h.plain()
    func(value, *args[1:], **kwargs)
    h.recipe = (*h.recipe[:3], value)
    return h


_OUTSIDE = (
    "lowmem_patch: a compiled function writes into logits that were made outside of it: write before, or "
    "compile the model with it"
)
_NAMES = frozenset(dir(Tensor))
_NO_VALUES = frozenset(("requires_grad_", "share_memory_", "rename_"))
_IN_PLACE = [
    name for name in _NAMES - _NO_VALUES if name.endswith("_") and not name.startswith("_")
]
_OPERATORS = [name for name in _NAMES if name.startswith("__i") and f"__{name[3:]}" in _NAMES]
READERS.update((name, _write) for name in (*_IN_PLACE, *_OPERATORS, "__setitem__"))
