"""A block that is not run again: all that it saves waits in host memory.

`offloaded` is the forward of such a block. Hooks of autograd take each tensor that is saved in it, and copy
its memory to the host. The weights stay, and what the block was given beside its input.

`awaiting` is the forward of a later block. Before it the copies must be made, and the memory on the device is
free; before its backward the copies back begin. So both run beside the blocks between, and what is on the
device at a time depends on the order of the step alone, not on the speed of the copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowmem_patch.functional import (
    as_it_is,
    backward_number,
    in_compiler,
    packs_saved_tensors,
    unwritten,
    without_torch_function,
)
from lowmem_patch.nn.caches import ForwardCaches
from lowmem_patch.nn.checkpointing import (
    Level,
    Recompute,
    checkpointed,
    given_tensors,
    input_among,
    saves_nothing,
)
from lowmem_patch.nn.deferred import Unstored, detached_of
from lowmem_patch.nn.host_memory import HostCopy, HostMemory, buffer_bytes
from lowmem_patch.nn.own import Own, inner_forward
from lowmem_patch.nn.segments import first_tensor
from lowmem_patch.nn.watched import Watched

_ORDINARY = (Tensor, nn.Parameter, FakeTensor, Watched)
_LEAST = 1 << 16  # bytes that are worth a copy


class _Saved:
    """The copies of what one run of a block saved; autograd alone holds them."""

    def __init__(self) -> None:
        self.copies: dict[int, weakref.ref[HostCopy]] = {}
        self.bytes = self.buffers = 0  # copied in this run, and of the buffers that hold it

    def add(self, copy: HostCopy) -> None:
        known = self.copies.get(id(copy))
        if known is None or known() is None:  # one that died may have had this id
            self.copies[id(copy)] = weakref.ref(copy)
            if copy.readers == 1:
                self.bytes += copy.size
                self.buffers += buffer_bytes(copy.size)

    def come(self, _: Any) -> None:
        """Begin the copies back; those that this backward does not read go when it ends. A hook of the node
        of the awaiting block's output."""
        with torch.no_grad():
            for copy in self.alive():
                copy.come()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        for copy in self.alive():
            copy.go()

    def alive(self) -> list[HostCopy]:
        copies = (reference() for reference in self.copies.values())
        return [copy for copy in copies if copy is not None]


class LastRun:
    """What a block saved last, until a later block awaits it; a copy of the model begins without."""

    def __init__(self) -> None:
        self.saved: _Saved | None = None
        self.bytes = self.buffers = 0  # of the run that was awaited last

    def end(self) -> _Saved | None:
        """What was saved has left the device."""
        saved, self.saved = self.saved, None
        if saved is not None:
            self.bytes, self.buffers = saved.bytes, saved.buffers
            for copy in saved.alive():
                copy.has_left()
        return saved

    def __reduce__(self) -> Any:
        return LastRun, ()


@dataclasses.dataclass(frozen=True)
class Offload(Level):
    """How a block is offloaded.

    Attributes:
        host: holds what it saves.
        last: its last run.
        caches: as in `Recompute`, which a compiler gets in its place.
    """

    host: HostMemory
    last: LastRun
    caches: ForwardCaches = dataclasses.field(default_factory=ForwardCaches)


@dataclasses.dataclass(frozen=True)
class Await(Level):
    """Which block a later one awaits."""

    host: HostMemory
    last: LastRun


def offloaded(
    block: nn.Module, how: Offload, given: Own | None, /, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a block whose saved tensors wait in host memory."""
    if in_compiler():
        return checkpointed(block, Recompute(caches=how.caches), given, *args, **kwargs)
    forward = inner_forward(block, given)
    again = backward_number() != -1
    if again or saves_nothing(block) or packs_saved_tensors():  # others recompute it, or pack
        return forward(*args, **kwargs)
    tensors = given_tensors(args, kwargs)
    x = input_among(tensors)
    if x is None:
        return forward(*args, **kwargs)
    others = [tensor for tensor in tensors if tensor is not x]
    stays = _memories((*others, *block.parameters(), *block.buffers()))
    how.last.end()  # of a run that nobody awaited
    saved = how.last.saved = _Saved()
    how.host.runs += 1
    with _Packing(how.host, saved, x.device, stays):
        return forward(*args, **kwargs)


def awaiting(block: nn.Module, how: Await, given: Own | None, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block before which an earlier one's tensors have left."""
    forward = inner_forward(block, given)
    saved = None if in_compiler() else how.last.end()
    output = forward(*args, **kwargs)
    tensor = None if saved is None else first_tensor(output)
    # no hook on the tensor, for which a deferred one would be computed
    node = None if tensor is None else _node_of(tensor)
    if node is not None and saved is not None:
        node.register_prehook(saved.come)
    return output


def _memories(tensors: tuple[Any, ...]) -> frozenset[int]:
    """The memories of tensors, by the identity of their storages."""
    with without_torch_function():
        return frozenset(
            int(tensor.untyped_storage()._cdata)
            for tensor in tensors
            if not (isinstance(tensor, Unstored) or is_traceable_wrapper_subclass(tensor))
            and tensor.layout is torch.strided
        )


def _node_of(tensor: Tensor) -> Any:
    """Its ``grad_fn``, of which a deferred tensor is not told; None also where torch raises in its place."""
    with without_torch_function(), contextlib.suppress(RuntimeError):
        return tensor.grad_fn
    return None


class _Part(NamedTuple):
    """A saved tensor, as a part of a memory that waits."""

    copy: HostCopy
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        memory = self.copy.value()
        whole = memory.numel() // self.dtype.itemsize * self.dtype.itemsize
        with torch.no_grad():
            values = memory[:whole].view(self.dtype)
            return values.as_strided(self.shape, self.strides, self.offset)


class _Packing(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what is saved is copied to the host.

    Args:
        device: of the tensors that are.
        stays: memories that are not.
    """

    def __init__(
        self, host: HostMemory, saved: _Saved, device: torch.device, stays: frozenset[int]
    ) -> None:
        def pack(tensor: Tensor) -> _Part | tuple[Tensor, int]:
            weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            if type(tensor) not in _ORDINARY:
                with without_torch_function():
                    tensor = tensor if tensor.is_leaf else detached_of(tensor)
            # a weight may be gathered in the block alone (FSDP2, ZeRO-3)
            if weight or not _is_large(tensor) or tensor.device != device:
                return as_it_is(tensor)
            if int(tensor.untyped_storage()._cdata) in stays:
                return as_it_is(tensor)
            copy = host.keep_storage(tensor)
            saved.add(copy)
            layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return _Part(copy, tensor.dtype, *layout)

        super().__init__(pack, _unpacked)


def _is_large(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor that is worth a copy."""
    plain = type(tensor) in _ORDINARY and tensor.layout is torch.strided
    lazy = tensor.is_conj() or tensor.is_neg()
    return plain and not lazy and tensor.nbytes >= _LEAST


def _unpacked(packed: _Part | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, _Part):
        return packed.value()
    return unwritten(*packed, "an offloaded block saved as it is")
