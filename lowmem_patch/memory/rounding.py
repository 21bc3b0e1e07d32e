"""What torch's allocator rounds up on a GPU, for tensors that stay (``c10/cuda/CUDACachingAllocator.cpp``).

A tensor above 1 MiB gets a block of a segment: segments have 20 MiB for tensors below 10 MiB, and whole
multiples of 2 MiB for larger ones. The smallest free block that is large enough is taken. What is left of it
becomes a block of its own if that is more than 1 MiB; else it is lost for as long as the tensor lives.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

__all__ = ["rounding_bytes"]

_MIB = 2**20
_SMALL = _MIB  # smaller tensors share segments, and lose less than 512 bytes
_SEGMENT, _LARGE, _MULTIPLE = 20 * _MIB, 10 * _MIB, 2 * _MIB
_UNIT = 512


def rounding_bytes(sizes: Iterable[int]) -> int:
    """Bytes lost by tensors of these sizes that are allocated one after another and stay."""
    free: list[int] = []  # blocks, smallest first
    lost = 0
    for size in sizes:
        if size <= _SMALL:
            continue
        need = -(-size // _UNIT) * _UNIT
        place = bisect.bisect_left(free, need)
        if place < len(free):
            block = free.pop(place)
        else:
            block = _SEGMENT if need < _LARGE else -(-need // _MULTIPLE) * _MULTIPLE
        if block - need > _SMALL:
            bisect.insort(free, block - need)
            block = need
        lost += block - size
    return lost
