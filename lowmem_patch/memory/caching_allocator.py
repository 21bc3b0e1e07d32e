"""What torch's allocator of a GPU gives for what is asked (``c10/cuda/CUDACachingAllocator.cpp``).

It takes segments from the GPU and gives blocks of them. Sizes are multiples of 512 bytes. Blocks up to 1 MiB
come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and larger ones have a segment of
their own, of whole multiples of 2 MiB. The smallest free block that is large enough is taken. What is left
of it becomes a free block if that is more than 1 MiB (512 bytes in a segment of 2 MiB); else it is lost for
as long as the block is held. Free neighbours are joined. Segments stay.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_STEPS = 3  # of a training, after which nothing new happens
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


class Allocated(NamedTuple):
    """Bytes of one GPU.

    Attributes:
        bytes: the most that is given at one time, model states included.
        margin: what other requests before the training may add to that.
        reserved: of all segments: what is taken from the GPU.
        event: the number of the request at which the most is given; that of all for the optimizer's step.
    """

    bytes: int
    margin: int
    reserved: int
    event: int


def allocated_in_step(
    held: Iterable[int],
    optimizer: Iterable[int],
    events: Sequence[tuple[int, int]],
    temporaries: Iterable[int] = (),
) -> Allocated:
    """The most that is given in the first steps of a training.

    What is rounded up depends on the free blocks that earlier requests left. So a training is played from its
    beginning: what is held, a first step, the optimizer's state, which that step makes, and two steps more.

    Args:
        held: bytes of each tensor that is there before the first step.
        optimizer: of each tensor of the optimizer's state.
        events: of one step: a number with the bytes that are asked for, and with 0 when they are released.
        temporaries: that the optimizer's step holds all at once.
    """
    allocator = CachingAllocator()
    at_most = large = 0

    def take(sizes: Iterable[int]) -> list[tuple[Block, int]]:
        return [(allocator.take(size), size) for size in filter(None, sizes)]

    take(held)
    for step in range(_STEPS):
        taken: dict[int, tuple[Block, int]] = {}
        for event, (number, size) in enumerate(events):
            if size:
                most = allocator.most
                taken[number] = allocator.take(size), size
                if allocator.most > most:
                    at_most, large = event, allocator.large
            elif number in taken:
                allocator.give_back(*taken.pop(number))
        most = allocator.most
        take(() if step else optimizer)
        beside = take(temporaries)
        if allocator.most > most:
            at_most, large = len(events), allocator.large
        for block, size in (*beside, *taken.values()):
            allocator.give_back(block, size)
    return Allocated(allocator.most, margin_of(large), allocator.reserved, at_most)


def margin_of(large: int) -> int:
    """Three standard deviations of what ``large`` blocks above 1 MiB lose together.

    One loses between 0 and 1 MiB, by the free block that it meets, with a standard deviation of
    1 / sqrt(12) MiB.
    """
    return int(3 * math.sqrt(large / 12) * _MIB)
