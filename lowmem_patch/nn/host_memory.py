"""Tensors that wait in host memory between forward and backward.

On a GPU the copies go through pinned buffers, which are reused, and run on a stream of their own beside the
computation. On a CPU it is a plain copy, in the same order.

Inputs of blocks (`HostMemory.keep`): the copy back is begun one tensor ahead, and at most two tensors are on
their way out at one time. All that a block saves (`HostMemory.keep_storage`): `lowmem_patch.nn.offloading`
says when the copies out must be made and when those back begin.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowmem_patch.errors import HostMemoryError
from lowmem_patch.functional import unwritten

_weak: Any = StorageWeakRef  # has no types
_LEAVING = 2  # inputs at one time


class _Layout(NamedTuple):
    """Of a copy, without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def buffer_bytes(size: int) -> int:
    """Of the buffer for a tensor: a power of two, as torch takes pinned memory. Tensors of many lengths share
    few sizes."""
    return 1 << max(9, (size - 1).bit_length())


class HostMemory:
    """The buffers of one model; a copy of the model has its own.

    Attributes:
        bytes: of host memory that are in use now.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.free: dict[tuple[torch.device, int], list[Tensor]] = {}  # pinned, by their bytes
        self.kept: list[weakref.ref[HostCopy]] = []  # inputs, in the order of the forward
        self.leaving: deque[weakref.ref[HostCopy]] = deque()  # inputs that are being copied
        self.storages: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()
        self.streams: dict[torch.device, Any] = {}
        self.runs = 0  # that have begun, of blocks whose memories are kept

    def __reduce__(self) -> Any:
        return HostMemory, ()

    def keep(self, tensor: Tensor, source: Tensor | None = None) -> HostCopy:
        """A copy of ``tensor``, whose memory on the device is free once nobody else has it; the copy that
        there is, if ``source``, whose values these are, was given before.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        source = tensor if source is None else source
        copies = [reference() for reference in self.kept]
        for known in copies:
            if known is not None and known.source() is source and known.version == source._version:
                return known
        strides = torch.empty_like(tensor, device="meta").stride()
        layout = _Layout(tuple(tensor.shape), strides, tensor.dtype)
        copy = HostCopy(self, tensor.detach(), layout, source)
        self.kept = [weakref.ref(known) for known in (*copies, copy) if known is not None]
        self.leaving.append(weakref.ref(copy))
        self.release(_LEAVING)
        return copy

    def keep_storage(self, tensor: Tensor) -> HostCopy:
        """A copy of the whole memory of ``tensor``; one for all tensors that share it, in a run of a block
        and in the next one.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        copy = self.storages.get(key)
        known = copy is not None and copy.run >= self.runs - 1 and not copy.storage.expired()
        if copy is None or not known or copy.version != tensor._version:
            layout = _Layout((storage.nbytes(),), (1,), torch.uint8)
            copy = HostCopy(self, tensor.detach(), layout, tensor)
            copy.storage = _weak(storage)  # nobody else gets its key meanwhile
            copy.run = self.runs
            self.storages[key] = copy
        copy.readers += 1
        return copy

    def copied(self, to: Tensor, source: Tensor, device: torch.device) -> tuple[Any, Any]:
        """When ``source`` will have been copied, and the stream of the computation; on a CPU it has been."""
        if device.type != "cuda":
            to.copy_(source)
            return None, None
        if device not in self.streams:
            make: Any = torch.cuda.Stream  # has no types
            self.streams[device] = make(device)
        stream, computes = self.streams[device], torch.cuda.current_stream(device)
        stream.wait_stream(computes)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event(), computes

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """One for a tensor of a device: what streams of two devices do has no order."""
        with contextlib.suppress(IndexError):  # none waits, or another thread took it
            return self.free.get((device, size), []).pop()
        try:
            pinned = device.type == "cuda"
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the host has no {size:,} bytes more for what a block saves: give patch_model another "
                "budget (fit=), or raise the limit of locked memory (ulimit -l)"
            ) from error

    def release(self, most: int = 0) -> None:
        """Hold at most so many inputs; the computation waits for the first ones."""
        while len(self.leaving) > most:
            with contextlib.suppress(IndexError):  # another thread took the last
                copy = self.leaving.popleft()()
                if copy is not None:
                    copy.has_left()

    def before(self, copy: HostCopy) -> HostCopy | None:
        """What was kept before ``copy``: backward asks for it next."""
        known = [reference() for reference in self.kept]
        place = next((i for i, one in enumerate(known) if one is copy), 0)
        return known[place - 1] if place else None


class HostCopy:
    """One tensor in host memory, or the memory that several have; `value` gives it back on its device.

    Attributes:
        leaving: the tensor while it is being copied, when it will have been, and the stream of the
            computation there; ``coming`` likewise.
        readers: how often autograd will ask for the memory in one backward; 0 for a tensor.
        storage: of the memory.
        run: of a block, in which it was made.
    """

    storage: Any = None
    run = 0

    def __init__(self, memory: HostMemory, tensor: Tensor, layout: _Layout, source: Tensor) -> None:
        self.memory, self.device, self.layout = memory, tensor.device, layout
        self.size = math.prod(layout.shape) * layout.dtype.itemsize
        self.source, self.version = weakref.ref(source), source._version
        self.coming: tuple[Tensor, Any, Any] | None = None
        self.buffer: Tensor | None = None
        self.like: Tensor | None = None
        self.written: Tensor | None = None  # since, so that the copy may be of other values
        self.readers = self.read = 0
        self.leaving: tuple[Tensor, Any, Any] | None = (tensor, None, None)
        if isinstance(tensor, FakeTensor):  # there are no values
            self.like = tensor.new_empty(0, dtype=layout.dtype)
        else:
            self._leave(tensor)
        memory.bytes += self.size

    def __del__(self) -> None:
        self.has_left()  # a graph that nobody runs backward through lets go, too
        self.go()
        if self.buffer is not None:
            key = self.device, self.buffer.numel()
            self.memory.free.setdefault(key, []).append(self.buffer)
        if self.buffer is not None or self.like is not None:
            self.memory.bytes -= self.size

    def _on_host(self) -> Tensor:
        assert self.buffer is not None
        values = self.buffer[: self.size].view(self.layout.dtype)
        return values.as_strided(self.layout.shape, self.layout.strides)

    def _leave(self, tensor: Tensor) -> None:
        self.buffer = self.memory.buffer(buffer_bytes(self.size), self.device)
        values = tensor
        if tensor.dtype != self.layout.dtype or tensor.shape != self.layout.shape:
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            values.set_(tensor.untyped_storage())
        self.leaving = tensor, *self.memory.copied(self._on_host(), values, self.device)

    def has_left(self) -> None:
        """Hold the tensor no more. The computation waits until its copy is made."""
        if self.leaving is None:
            return
        (tensor, copied, computes), self.leaving = self.leaving, None
        if copied is not None:
            # whoever lets go, the memory is given to the stream that had it
            computes.wait_event(copied)
            self.written = tensor if tensor._version != self.version else None

    def come(self) -> None:
        """Begin the copy back, if it has not begun."""
        if self.coming is not None:
            return
        shape, strides, dtype = self.layout
        if self.like is not None:
            self.coming = self.like.new_empty_strided(shape, strides), None, None
            return
        # for the stream that reads it; others may have had its memory until now
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        self.coming = tensor, *self.memory.copied(tensor, self._on_host(), self.device)

    def go(self) -> None:
        """Hold nothing on the device that came back."""
        if self.coming is not None and self.coming[1] is not None:
            # nobody gets the memory that the other stream still writes
            self.coming[2].wait_event(self.coming[1])
        self.coming, self.read = None, 0

    def value(self) -> Tensor:
        """The tensor on its device again; for an input, the copy of the one before it begins.

        Raises:
            RuntimeError: somebody wrote into it while it was being copied.
        """
        self.memory.release()
        self.has_left()
        if self.written is not None:
            unwritten(self.written, self.version, "was being copied to host memory")
        with torch.no_grad():
            self.come()
            assert self.coming is not None
            tensor, copied, _ = self.coming
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
            self.read += 1
            if self.read >= self.readers:  # the last one has it alone
                self.coming, self.read = None, 0
            ahead = None if self.readers else self.memory.before(self)
            if ahead is not None and ahead.device == self.device:
                ahead.come()
        return tensor
