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

_WEIGHTS_OF_A_SCALE, _SCALE = 64, 4  # bitsandbytes: one float32 for so many weights


class LiveStorages(DispatchObserver):
    """Counts each storage from the op that allocates it to its release.

    Attributes:
        live: by key: bytes, the ``owner`` when it was allocated, and a reference.
        now: bytes that are alive.
        owner: to whom the next allocations belong.
    """

    def __init__(self, ignored: Iterable[Tensor], packed: Iterable[Tensor] = ()) -> None:
        """Args:
        ignored: tensors whose storages are not counted.
        packed: weights of few bits, which a product of another library unpacks for a while.
        """
        super().__init__()
        self.ignored = set(map(storage_key, ignored))
        self.packed = set(map(storage_key, packed))
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.now, self.owner = 0, -1

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        if self.packed and func.namespace != "aten":
            unpacked = self._unpacked(args, output)
            self.now += unpacked
            self.grown()
            self.now -= unpacked
        return output

    def _unpacked(self, args: tuple[Any, ...], output: Any) -> int:
        """Bytes of a weight, with its scales, that a product of another library unpacks inside: torch sees
        no allocation there. A kernel that unpacks as it multiplies takes less."""
        given = [a for a in args if isinstance(a, Tensor)]
        if not (given and isinstance(output, Tensor) and given[0].shape[:-1] == output.shape[:-1]):
            return 0  # no product of rows
        weights = output.shape[-1] * given[0].shape[-1]
        if not any(w.numel() < weights and storage_key(w) in self.packed for w in given[1:]):
            return 0
        return weights * given[0].element_size() + -(-weights // _WEIGHTS_OF_A_SCALE) * _SCALE

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
