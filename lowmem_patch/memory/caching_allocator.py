"""What torch's allocator of a GPU gives for what is asked (``c10/cuda/CUDACachingAllocator.cpp``).

It takes segments from the GPU and gives blocks of them. Sizes are multiples of 512 bytes. Blocks up to 1 MiB
come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and larger ones have a segment of
their own, of whole multiples of 2 MiB. The smallest free block that is large enough is taken. What is left
of it becomes a free block if that is more than 1 MiB (512 bytes in a segment of 2 MiB); else it is lost for
as long as the block is held. Free neighbours are joined. Segments stay.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

_MIB = 2**20
_UNIT = 512
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_LARGE, _SEGMENT, _MULTIPLE = 10 * _MIB, 20 * _MIB, 2 * _MIB


class Block:
    """Bytes of a segment from an address on, and its neighbours there."""

    __slots__ = ("address", "before", "behind", "free", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.free = address, size, True
        self.before: Block | None = None
        self.behind: Block | None = None


class CachingAllocator:
    """Blocks of one stream.

    Attributes:
        allocated: bytes of the blocks that are held.
        reserved: bytes of all segments.
        most: the largest ``allocated`` so far.
        large: how many blocks above 1 MiB are held.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most = self.large = 0
        # by pool (small, large): sizes and addresses of free blocks in their order, and the blocks
        self._order: tuple[list[tuple[int, int]], ...] = ([], [])
        self._blocks: tuple[dict[int, Block], ...] = ({}, {})

    def take(self, size: int) -> Block:
        """A block of at least ``size`` bytes."""
        need = max(_UNIT, -(-size // _UNIT) * _UNIT)
        large = need > _SMALL
        order = self._order[large]
        place = bisect.bisect_left(order, (need, 0))
        if place < len(order):
            block = self._blocks[large].pop(order.pop(place)[1])
        else:
            block = Block(self.reserved, _segment_bytes(need))
            self.reserved += block.size
        block.free = False
        left = block.size - need
        if left > _SMALL if large else left >= _UNIT:
            rest = Block(block.address + need, left)
            rest.before, rest.behind, block.behind, block.size = block, block.behind, rest, need
            if rest.behind is not None:
                rest.behind.before = rest
            self._set_free(rest, large)
        self.large += large
        self.allocated += block.size
        self.most = max(self.most, self.allocated)
        return block

    def give_back(self, block: Block, size: int) -> None:
        """Release a block that was taken for ``size`` bytes."""
        self.allocated -= block.size
        large = size > _SMALL
        self.large -= large
        before, behind = block.before, block.behind
        if before is not None and before.free:
            self._forget(before, large)
            block.address, block.before = before.address, before.before
            block.size += before.size
            if block.before is not None:
                block.before.behind = block
        if behind is not None and behind.free:
            self._forget(behind, large)
            block.size, block.behind = block.size + behind.size, behind.behind
            if block.behind is not None:
                block.behind.before = block
        self._set_free(block, large)

    def _set_free(self, block: Block, large: bool) -> None:
        block.free = True
        bisect.insort(self._order[large], (block.size, block.address))
        self._blocks[large][block.address] = block

    def _forget(self, block: Block, large: bool) -> None:
        order = self._order[large]
        del order[bisect.bisect_left(order, (block.size, block.address))]
        del self._blocks[large][block.address]


def _segment_bytes(need: int) -> int:
    if need <= _SMALL:
        return _SMALL_SEGMENT
    return _SEGMENT if need < _LARGE else -(-need // _MULTIPLE) * _MULTIPLE


def rounding_bytes(sizes: Iterable[int]) -> int:
    """Bytes lost above 512 by tensors of these sizes that are allocated one after another and stay."""
    allocator, lost = CachingAllocator(), 0
    for size in sizes:
        lost += allocator.take(size).size - size if size > _SMALL else 0
    return lost
