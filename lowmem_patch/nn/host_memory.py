"""Tensors that wait in host memory between forward and backward.

On a GPU the copies go through pinned buffers, which are reused, and run on a stream of their own beside the
computation; the copy back is begun one tensor ahead. At most two tensors are on their way out at one time. On
a CPU it is a plain copy, in the same order.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.errors import HostMemoryError

_LEAVING = 2  # tensors at one time
_ROUNDED = 512  # bytes of a buffer, so that more tensors share its size


class HostMemory:
    """The buffers of one model; a copy of the model has its own."""

    def __init__(self) -> None:
        self.free: dict[int, list[Tensor]] = {}  # pinned, by their bytes
        self.kept: list[weakref.ref[HostCopy]] = []  # in the order of the forward
        self.leaving: deque[tuple[Tensor, Any]] = deque()  # tensors, and when their copies are made
        self.streams: dict[torch.device, Any] = {}

    def __reduce__(self) -> Any:
        return HostMemory, ()

    @property
    def bytes(self) -> int:
        """Bytes of host memory that are in use now."""
        copies = [reference() for reference in self.kept]
        return sum(copy.size for copy in copies if copy is not None)

    def keep(self, tensor: Tensor, source: Tensor | None = None) -> HostCopy:
        """A copy of ``tensor``, whose memory on the device is free once nobody else has it; the copy that
        there is, if ``source``, whose values these are, was given before.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        source = tensor if source is None else source
        copies = [reference() for reference in self.kept]
        for known in copies:
            if known is not None and known.is_of(source):
                return known
        copy = HostCopy(self, tensor, source)
        self.kept = [weakref.ref(known) for known in (*copies, copy) if known is not None]
        return copy

    def stream(self, device: torch.device) -> Any:
        if device not in self.streams:
            make: Any = torch.cuda.Stream  # has no types
            self.streams[device] = make(device)
        return self.streams[device]

    def buffer(self, size: int, *, pinned: bool) -> Tensor:
        waiting = self.free.get(size)
        if waiting:
            return waiting.pop()
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the host has no {size:,} bytes more for the input of a block: give patch_model another "
                "budget (fit=), or raise the limit of locked memory (ulimit -l)"
            ) from error

    def hold(self, tensor: Tensor, copied: Any) -> None:
        """Hold what is being copied. Where a third comes, the computation waits for the first."""
        self.leaving.append((tensor, copied))
        while len(self.leaving) > _LEAVING:
            self._release()

    def release(self) -> None:
        """Hold nothing more."""
        while self.leaving:
            self._release()

    def _release(self) -> None:
        tensor, copied = self.leaving.popleft()
        if copied is not None:
            torch.cuda.current_stream(tensor.device).wait_event(copied)

    def before(self, copy: HostCopy) -> HostCopy | None:
        """What was kept before ``copy``: backward asks for it next."""
        known = [reference() for reference in self.kept]
        place = next((i for i, one in enumerate(known) if one is copy), 0)
        return known[place - 1] if place else None


class HostCopy:
    """One tensor in host memory; `value` gives it back on its device."""

    def __init__(self, memory: HostMemory, tensor: Tensor, source: Tensor) -> None:
        self.memory, self.device = memory, tensor.device
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.strides = torch.empty_like(tensor, device="meta").stride()  # without gaps
        self.size = tensor.nbytes
        self.source, self.version = weakref.ref(source), source._version
        self.coming: tuple[Tensor, Any] | None = None
        self.buffer: Tensor | None = None
        self.like: Tensor | None = None
        if isinstance(tensor, FakeTensor):  # there are no values
            self.like = tensor.detach().new_empty(0)
            memory.hold(tensor.detach(), None)
        else:
            self._leave(tensor.detach())

    def is_of(self, tensor: Tensor) -> bool:
        return self.source() is tensor and self.version == tensor._version

    def __del__(self) -> None:
        self.memory.release()  # a graph that nobody runs backward through lets go, too
        if self.coming is not None and self.coming[1] is not None:
            # nobody gets the memory that the other stream still writes
            torch.cuda.current_stream(self.device).wait_event(self.coming[1])
        if self.buffer is not None:
            self.memory.free.setdefault(self.buffer.numel(), []).append(self.buffer)

    def _on_host(self) -> Tensor:
        assert self.buffer is not None
        values = self.buffer[: self.size].view(self.dtype)
        return values.as_strided(self.shape, self.strides)

    def _leave(self, tensor: Tensor) -> None:
        cuda = tensor.is_cuda
        self.buffer = self.memory.buffer(-(-self.size // _ROUNDED) * _ROUNDED, pinned=cuda)
        if not cuda:
            self._on_host().copy_(tensor)
            self.memory.hold(tensor, None)
            return
        stream = self.memory.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._on_host().copy_(tensor, non_blocking=True)
            copied = stream.record_event()
        self.memory.hold(tensor, copied)

    def come(self) -> None:
        """Begin the copy back, if it has not begun."""
        if self.coming is not None:
            return
        if self.like is not None:
            self.coming = self.like.new_empty_strided(self.shape, self.strides), None
            return
        # for the stream that reads it; others may have had its memory until now
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if not tensor.is_cuda:
            self.coming = tensor.copy_(self._on_host()), None
            return
        stream = self.memory.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            tensor.copy_(self._on_host(), non_blocking=True)
            self.coming = tensor, stream.record_event()

    def value(self) -> Tensor:
        """The tensor on its device again; the copy of the one before it begins."""
        self.memory.release()
        with torch.no_grad():
            self.come()
            assert self.coming is not None
            (tensor, copied), self.coming = self.coming, None
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
            ahead = self.memory.before(self)
            if ahead is not None and ahead.device == self.device:
                ahead.come()
        return tensor
