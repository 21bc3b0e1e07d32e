"""Deferred tensors: tensors of autograd that know from what they are computed.

An activation, a norm or a cast may return a ``Deferred``. To everybody it is a `torch.Tensor` with a
``grad_fn``. A `Stored` one holds its values, as any tensor. An `Unstored` one has no storage: its values are
computed when an op is dispatched on it, in Python or C++, and may be let go then (`Op.was_read`).

A few readers save less (the table `lowmem_patch.nn.readers`):

- a Linear or a grouped matmul saves what the values are computed from (`Op.linear`, `Op.grouped`);
- a row move (view, permute, roll, window partition) moves what the values are computed from;
- ``activation * up`` becomes one gated product, and a scaled sum of an adapter stays in low precision;
- a cast to another floating dtype is computed when it is read, and a dropout saves its mask in bits.

Every other reader gets the values and sends its gradient to the deferred tensor's own node: a custom autograd
function, a hook, a checkpoint behind it. A write, a hook or a request for the memory makes all readers so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._C._dynamo.eval_frame as frames
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from lowmem_patch.functional import (
    SharedInput,
    backward_number,
    in_compiler,
    is_in_other_block,
    packer,
    register_known,
    register_plain,
    without_grad,
    without_torch_function,
)
from lowmem_patch.nn.op import Arguments, Function, Named, Op, refuse_bypassed, waits_for_gradient
from lowmem_patch.nn.shared_memory import (
    MADE_OUTSIDE,
    SharedMemory,
    effects_of,
    open_written,
    reshapes,
    written_arguments,
)
from lowmem_patch.tracing.call_arguments import by_place

_RUN_BACKWARD = (Tensor.backward, torch.autograd.grad)
_call: Any = torch._C._disabled_torch_function_impl  # in less time than the above

# By the name of a torch function: gets (func, args, kwargs), and returns NotImplemented where the function
# itself shall run, on the values. Filled by `lowmem_patch.nn.readers`.
READERS: dict[str, Callable[..., Any]] = {}


class Deferred(Tensor):
    """Base of `Unstored` and `Stored`; made by `lowmem_patch.nn.defer` and `lowmem_patch.nn.stored.keep`.

    Attributes:
        op: how it is computed, or read.
        sources: the tensors from which it is computed, with their history.
    """

    op: Op
    sources: tuple[Tensor, ...]
    _versions: list[int] | None = None  # of the sources, where a write into them must be noticed
    _first_version = 0
    _origin: Tensor | None = None  # in whose place this one only passes through a forward
    _exposed = False  # somebody may write into its memory without a trace
    _adapts: bool  # an adapter reads it now, whose products stay in its dtype
    was_bypassed = False  # a reader sends its gradient to the sources
    _node_given = False  # somebody has its node, and may hang a hook on that
    _normed: Tensor | None = None  # of a norm that waited: what its Linears read
    _shared: SharedInput | None = None  # what several Linears read in its place
    _packer: Any = None  # who packed what autograd saves where it was made

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Named | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # a checkpoint may run modules again in a backward, and they need torch functions
        if func in _RUN_BACKWARD:
            with without_torch_function():
                inputs = kwargs["inputs"] if "inputs" in kwargs else args[1:2]
                refuse_bypassed(inputs if func is torch.autograd.grad else ())
                args = (tree_map(value_of, args[0]), *tree_map(origin_of, args[1:]))
            if not any(isinstance(item, Deferred) for item in tree_leaves(args)):
                return func(*args, **kwargs)
        reader = READERS.get(getattr(func, "__name__", ""))
        given = (args, kwargs) if args else by_place(args, kwargs)
        if reader is not None and given[0]:
            with without_torch_function():
                known = reader(func, *given)
            if known is not NotImplemented:
                return known
        return _call_on_values(func, types, args, kwargs)

    def plain(self) -> Tensor:
        """The value as an ordinary tensor, whose gradient comes here."""
        raise NotImplementedError

    def detached(self) -> Tensor:
        """The value as an ordinary tensor without a gradient."""
        raise NotImplementedError

    def is_changed(self) -> bool:
        """Whether readers must read the value: somebody wrote into it, or waits for its gradient."""
        return not in_compiler() and self._is_changed()

    def _is_changed(self) -> bool:
        if self._exposed or self._version != self._first_version or is_in_other_block(self._packer):
            return True
        # a leaf of its own, after detach(), or cut off from what it was computed from, by detach_()
        if self.grad_fn is None and (
            self.requires_grad or any(source.requires_grad for source in self.sources)
        ):
            return True
        stale = self._versions is not None and self.is_stale()
        if stale or (self.op.may_be_bypassed and waits_for_gradient(self)):
            return True
        sources = self.sources
        return bool(sources) and isinstance(sources[0], Deferred) and sources[0].is_changed()

    def open(self, writes: bool) -> None:
        """Somebody writes into the memory in a compiled graph, or may do so through a view."""

    def is_stale(self) -> bool:
        """Whether somebody wrote into a source since, so that the value cannot be computed from it."""
        versions = self._versions
        if versions is None:
            return False
        return [source._version for source in self.sources] != versions or self.op.is_outdated()

    def __deepcopy__(self, memo: Any) -> Any:
        if self.grad_fn is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        return self.detached().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.detached().requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)


# Behind a break of a graph torch compiles each Python function that runs as a frame of its own. The guards of
# such a frame do not tell one ``func`` from another: what was compiled for ``logits.logsumexp(-1)`` ran for
# ``logits / 2``, too. So this one runs as it is written, with all that it calls, where torch calls it; where
# the compiler traces a call, it still becomes a part of the graph. A mark on code takes no time of a call.
_ALONE = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
frames.set_code_exec_strategy(Deferred.__torch_function__.__code__, _ALONE)


class Stored(Deferred):
    """A tensor that holds its values; see `keep`."""

    def plain(self) -> Tensor:
        if in_compiler():
            return self.view_as(self)
        return self.as_subclass(Tensor) if self._origin is None else self._origin

    def detached(self) -> Tensor:
        return self.view_as(self).detach() if in_compiler() else self.detach()


class Unstored(Deferred):
    """A tensor without storage; see `lowmem_patch.nn.defer`."""

    held = False  # its values stay: they were there before it, or somebody has their storage
    _value: Tensor | None = None
    _value_version = 0
    _times_read = 0
    _memory: SharedMemory | None = None
    _watch: Tensor | None = None  # has the version of this one

    @classmethod
    @_disable_dynamo  # torch 2.15 compiles it as a frame of its own, behind a break of a graph
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance's
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Named | None = None
    ) -> Any:
        kwargs = kwargs or {}
        origins: dict[int, Unstored] = {}
        mutable, views = effects_of(func)
        written = written_arguments(func, args, kwargs, Unstored) if mutable else []

        def read(item: Any) -> Any:
            if not isinstance(item, Unstored):
                return item
            value = item.read_for(func.overloadpacket.__name__)
            origins[id(value)] = item
            return value

        # no function calls itself here: it would hold what it has read until garbage is collected
        def read_all(item: Any) -> Any:
            return [read(one) for one in item] if isinstance(item, (list, tuple)) else read(item)

        output = func(*map(read_all, args), **{k: read_all(v) for k, v in kwargs.items()})
        _tell_read(origins.values(), written, watch=views and not mutable)
        if not mutable:
            return output
        if written and written[0] is not args[0]:  # torch counts no writes into a list
            torch.autograd.graph.increment_version(written)
        if reshapes(func):
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        return tree_map(lambda item: origins.get(id(item), item), output)  # written in place

    def read_for(self, name: str) -> Tensor:
        """The values, for a torch function of this name."""
        if self._value is None:
            self.op.note_reader(name)
        return self.read()

    def read(self) -> Tensor:
        """The values, computed once; below autograd."""
        if self._memory is not None:
            self._memory.refuse_read(self)
        if self._value is None:
            if self.is_stale():
                raise RuntimeError(self.op.written_source)
            if torch.is_inference_mode_enabled():  # its tensors could never be saved
                with torch.inference_mode(False):
                    return self.read()
            values = None
            # in a node of a backward, and in no forward that a checkpoint runs again there
            if backward_number() != -1 and not torch.is_grad_enabled() and packer() is None:
                values = self.op.in_backward(self)
            if values is None:
                with without_grad(), without_torch_function():
                    values = self.op.compute(*map(detached_of, self.sources))
            self._value, self._value_version = values, values._version
            self.op.was_computed(self.sources)
        return self._value

    def held_values(self) -> Tensor | None:
        """The values, if they are there now; unless ``held``, they may be let go."""
        return self._value

    def let_go(self) -> None:
        """Hold the values no longer, unless somebody wrote into them, or may do so."""
        shares = self._memory is not None and self._memory.is_shared(self)
        may_write = self.held or self._exposed or shares
        written = self._version != self._first_version or self.is_stale()
        if not (may_write or written):
            self._value = None

    def plain(self) -> Tensor:
        return self.view_as(self)

    def detached(self) -> Tensor:
        return self.read().detach()

    def is_changed(self) -> bool:
        value = self._value
        if in_compiler():  # made outside of its graph: readers may have written into the values
            watched = self._memory is not None and len(self._memory.watched) > 0
            return value is not None or self._exposed or watched
        if self._memory is not None:
            self._memory.refuse_read(self)
        return (value is not None and value._version != self._value_version) or self._is_changed()

    def open(self, writes: bool) -> None:
        if writes or self.was_bypassed:
            raise RuntimeError(MADE_OUTSIDE)  # the compiler leaves this to eager code
        self._exposed = True


def _tell_read(items: Iterable[Unstored], written: list[Any], *, watch: bool) -> None:
    """An operator has read these, or has ``written`` into them. ``watch``: it may have made views of them."""
    for item in items:
        if watch:
            SharedMemory.of(item).watch(item)
        if not any(item is one for one in written):
            item.op.was_read(item)


_OWN: set[type] = {Tensor, Stored, Unstored}

register_plain(Stored)
register_known(Unstored)


def register_own(kind: type[Unstored]) -> None:
    """Say that a class of deferred tensors is read as its base is, and is no stranger's."""
    _OWN.add(kind)
    register_known(kind)


def _call_on_values(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if in_compiler():
        with without_torch_function():
            open_written(func, args, kwargs, Deferred)
    if not _OWN.issuperset(types):
        # another subclass has an opinion, and is given ordinary tensors; or a compiler asks for values
        with without_torch_function():
            args, kwargs = tree_map(value_of, args), tree_map(value_of, kwargs)
        return func(*args, **kwargs)
    if in_compiler():
        with without_torch_function():
            return func(*args, **kwargs)
    output: Any = _call(func, types, tuple(map(origin_of, args)), kwargs)
    values = isinstance(output, (Tensor, tuple, list)) and type(output) is not torch.Size
    if values and args and isinstance(args[0], Deferred):
        args[0].op.was_used(args[0])
    if args and output is not None and output is getattr(args[0], "_origin", None):
        return args[0]  # a function that returns its own input, as .to() may
    return output


def detached_of(source: Tensor) -> Tensor:
    """The values of a tensor, also of a deferred one, without its place in the graph."""
    return source.detached() if isinstance(source, Deferred) else source.detach()


def origin_of(item: Any) -> Any:
    """What a gradient for ``item`` goes to."""
    origin = item._origin if isinstance(item, Deferred) else None
    return item if origin is None else origin


def value_of(item: Any) -> Any:
    """An ordinary tensor in the place of a deferred one."""
    if not isinstance(item, Deferred):
        return item
    with without_torch_function():
        return item.plain()
