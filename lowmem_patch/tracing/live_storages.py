"""The bytes of all storages that are alive while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowmem_patch.tracing.observers import DispatchObserver
from lowmem_patch.tracing.saved_bytes import storage_key

__all__ = ["LiveStorages"]


class LiveStorages(DispatchObserver):
    """Counts each storage from the op that allocates it to its release.

    Attributes:
        live: by key: bytes, the ``owner`` when it was allocated, and a reference.
        now: bytes that are alive.
        owner: to whom the next allocations belong.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        """``ignored``: tensors whose storages are not counted."""
        super().__init__()
        self.ignored = set(map(storage_key, ignored))
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.now, self.owner = 0, -1

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return output

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted or ignored."""
        key = storage_key(tensor)
        if key in self.live or key in self.ignored:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def released(_reference: Any, key: int = key, size: int = size) -> None:
            del self.live[key]
            self.now -= size

        self.live[key] = (size, self.owner, weakref.ref(storage, released))
        self.now += size
        self.grown()

    def grown(self) -> None:
        """Called when ``now`` has grown."""
        raise NotImplementedError
