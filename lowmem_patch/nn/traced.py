"""Deferred tensors of which a compiler sees the shape alone, and which leave its graph as deferred tensors.

In a compiled graph one stands for its recipe: known readers read the sources, and any other function gets the
values, computed there. Where one leaves the graph, the compiler returns what it saw (one number, expanded),
and sets the attributes of this class on it once more. Setting the recipe makes it the tensor that eager code
would have deferred.

The compiler of torch 2.15 asks no tensor class about an assignment to a part of a tensor, and about a loop
over its rows. An assignment is noticed, since it is one to what the compiler sees. The row of a loop has no
recipe.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lowmem_patch.functional import compilers_output, is_written, placeholder
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, Unstored
from lowmem_patch.nn.op import Arguments, Function, Named, Op
from lowmem_patch.nn.shared_memory import MADE_OUTSIDE, SharedMemory
from lowmem_patch.tracing.op_roles import Role, function_name, names_with

# places in a memory: the values, once somebody may write there; who shares it outside of the graph; how the
# values are made, where they are made in the graph; from there on, what the compiler sees of all who share it
_VALUES, _OUTSIDE, _MAKER, _SEEN = range(4)
_ASSIGNED = (
    "lowmem_patch: a compiled function assigns to a part of logits (logits[...] = value), which torch's "
    "compiler tells nobody: write logits[...].fill_(value) or logits[...].copy_(value), or use torch.where"
)
_ITERATED = (
    "lowmem_patch: a compiled function goes through the rows of logits, which torch's compiler tells nobody: "
    "go through logits.unbind()"
)


class Traced(Deferred):
    """A deferred tensor in a compiled graph; made by `trace`.

    The recipe is (class of the op, its arguments, the sources, the memory, the path to it). The memory is a
    list that all views share, and the path the functions that make this one of the memory's values.
    """

    @_disable_dynamo  # torch.compiler.disable, without its import of the compiler, which would compile this
    def _leave(self, recipe: Any) -> None:
        kind, arguments, sources, memory, path = recipe
        if any(map(is_written, memory[_SEEN:])):
            raise RuntimeError(_ASSIGNED)
        swap: Any = torch.utils.swap_tensors
        values = memory[_VALUES]
        if values is not None:
            with torch.enable_grad():
                swap(self, _along(path, values.view_as(values)))
            return
        swap(self, defer(kind(*arguments), sources))
        if memory[_OUTSIDE] is None:
            memory[_OUTSIDE] = SharedMemory()
        memory[_OUTSIDE].add(self)

    def _missing(self) -> Any:
        raise RuntimeError(_ITERATED)

    recipe: Any = property(_missing, _leave)  # a compiler reads what it was set to

    @property
    def op(self) -> Op:  # type: ignore[override]  # an attribute elsewhere
        made: Op = self.recipe[0](*self.recipe[1])
        return made

    @property
    def sources(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # likewise
        found: tuple[Tensor, ...] = self.recipe[2]
        return found

    def is_changed(self) -> bool:
        if _assigns():
            raise RuntimeError(_ASSIGNED)
        return self.recipe[3][_VALUES] is not None

    def plain(self) -> Tensor:
        if _assigns():
            raise RuntimeError(_ASSIGNED)
        values = self.recipe[3][_VALUES]
        return self.op.compute(*self.sources) if values is None else _along(self.recipe[4], values)

    def detached(self) -> Tensor:
        return self.plain().detach()

    def open(self, writes: bool) -> None:
        memory = self.recipe[3]
        if memory[_VALUES] is not None:
            return
        if memory[_MAKER] is None:
            raise RuntimeError(MADE_OUTSIDE)
        kind, arguments, sources = memory[_MAKER]
        with torch.enable_grad():
            memory[_VALUES] = kind(*arguments).compute(*sources)


def _along(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
    for name, args, kwargs, part in path:
        moved: Any = getattr(Tensor, name)(tensor, *args, **kwargs)
        tensor = moved if part is None else moved[part]
    return tensor


def trace(kind: type[Op], arguments: tuple[Any, ...], sources: tuple[Tensor, ...]) -> Deferred:
    """A deferred tensor of the op ``kind(*arguments)``, in a compiled graph."""
    op = kind(*arguments)
    if _builds_criterion():
        seen = op.compute(*sources)
        memory: list[Any] = [seen, None, None]
    else:
        seen = placeholder(sources[0].detach(), op.shape(sources), op.dtype(sources))
        memory = [None, None, (kind, arguments, sources), seen]
    h: Any = seen.as_subclass(Traced)
    h.recipe, h.was_bypassed = (kind, arguments, sources, memory, ()), False
    return h  # type: ignore[no-any-return]  # as_subclass has no types


def join(found: Any, h: Deferred, func: Function, args: Arguments, kwargs: Named) -> Any:
    """``found``, which ``func`` gave of ``h``: a deferred tensor or several, in the memory of h."""
    if found is h or found is NotImplemented:
        return found
    name = function_name(func)
    if name in _COPIES:
        return found
    several = isinstance(found, tuple)
    may_copy = name in _MAY_COPY
    for number, one in enumerate(found if several else (found,)):
        if isinstance(one, Unstored):
            if isinstance(h, Unstored) and not h.held:
                copied = may_copy and one.is_contiguous() and not h.is_contiguous()
                if not copied:
                    SharedMemory.of(h).add(one)
        elif isinstance(one, Traced):
            _join_traced(one, h, (name, args[1:], kwargs, number if several else None), may_copy)
    return found


_COPIES = names_with(Role.ROLL | Role.PAD)
_MAY_COPY = names_with(Role.RESHAPE | Role.CONTIGUOUS)


def _join_traced(one: Traced, h: Any, move: tuple[Any, ...], may_copy: bool) -> None:
    if not isinstance(h, Traced):  # made outside
        one.recipe = (*one.recipe[:3], [None, h._memory, None, *one.recipe[3][_SEEN:]], ())
        return
    memory, path = h.recipe[3:]
    maker = memory[_MAKER]
    if may_copy and maker is not None:
        kind, arguments, sources = maker
        like = torch.empty(kind(*arguments).shape(sources), device="meta")
        before = _along(path, like)
        if not before.is_contiguous() and _along((move,), before).is_contiguous():
            return
    memory.extend(one.recipe[3][_SEEN:])
    one.recipe = (*one.recipe[:3], memory, (*path, move))


def _assigns() -> bool:
    """Whether the graph that is being made assigns to a part of one number, expanded."""
    for node in compilers_output().graph.nodes:
        if node.target is operator.setitem:
            seen = node.args[0].meta["example_value"]
            if all(type(stride) is int and stride == 0 for stride in seen.stride()):
                return True
    return False


def _builds_criterion() -> bool:
    """Whether code that is being compiled makes an `nn.CrossEntropyLoss`: the compiler has its own function
    in the place of that, which reads what the compiler saw."""
    frame: Any = compilers_output().current_tx
    while frame is not None:
        if nn.CrossEntropyLoss.__name__ in frame.f_code.co_names:
            return True
        frame = frame.parent
    return False


# torch.compiler.assume_constant_result, without its import of the compiler
for _asked in (_assigns, _builds_criterion):
    _asked._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's mark
