"""Bytes that are allocated, counted storage by storage, with whoever holds them."""

from __future__ import annotations

import gc
import importlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made while it is on, until they are released.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        return sum(self.held.values())

    def settled(self) -> int:
        """``now``, once nothing waits for the garbage collector."""
        gc.collect()
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "bitsandbytes.gemm_4bit.default":
            operators = importlib.import_module("bitsandbytes.backends.default.ops")
            with self:  # its kernel for CPUs is made of ops, which allocate as well
                output = operators._gemm_4bit_default_impl(*args, **(kwargs or {}))
        else:
            output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        self.peak = max(self.peak, self.now)
        return output

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.held:
            self.held[key] = storage.nbytes()
            self.references[key] = weakref.ref(storage, lambda _, key=key: self._remove(key))

    def _remove(self, key: int) -> None:
        del self.held[key], self.references[key]

    def count(self, *tensors: Tensor) -> None:
        """Count these, which were there before."""
        for tensor in tensors:
            self._add(tensor)

    def ignore(self, *tensors: Tensor) -> None:
        """Count these no more (of model states that were there before)."""
        for tensor in tensors:
            self.held[tensor.untyped_storage()._cdata] = 0


def allocated(run: Callable[[], None]) -> int:
    """The largest sum of allocations minus frees that torch's profiler sees."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what others left in circles would be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes), default=0)
