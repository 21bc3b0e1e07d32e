"""The most that a GPU's allocator gives in a training step, from the bytes that the step asks for in order.

What it rounds up depends on the free blocks that earlier requests left. So a training is played from its
beginning: the model, a first step, the optimizer's state, which that step makes, and two steps more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from lowmem_patch.memory.caching_allocator import Block, CachingAllocator
from lowmem_patch.memory.model_states import StateSizes

_STEPS = 3
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Allocated:
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

    @property
    def bound(self) -> int:
        """The most, by all that is expected of earlier requests."""
        return self.bytes + self.margin


def allocated_in_step(
    sizes: StateSizes,
    events: Sequence[tuple[int, int]],
    *,
    accumulates: bool,
    temporaries: Iterable[int] = (),
) -> Allocated:
    """The most that is given in the first steps of a training.

    Args:
        sizes: of the model states.
        events: of one step: a number with the bytes that are asked for, and with 0 when they are released.
        accumulates: gradients are held from the beginning.
        temporaries: that the optimizer's step holds all at once.
    """
    played = _Played()
    played.keep((*sizes.held, *sizes.workspaces))
    if accumulates:
        played.keep(sizes.gradients)
    for number in range(_STEPS):
        played.step(events, temporaries, () if number else sizes.optimizer)
    allocator = played.allocator
    return Allocated(allocator.most, margin_of(played.large), allocator.reserved, played.event)


def margin_of(large: int) -> int:
    """Three standard deviations of what ``large`` blocks above 1 MiB lose together.

    One loses between 0 and 1 MiB, by the free block that it meets, with a standard deviation of
    1 / sqrt(12) MiB.
    """
    return int(3 * math.sqrt(large / 12) * _MIB)


class _Played:
    """An allocator, and when it gave most.

    Attributes:
        event: the number in its step.
        large: blocks above 1 MiB that were held then.
    """

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.event = self.large = 0

    def keep(self, sizes: Iterable[int]) -> None:
        for size in filter(None, sizes):
            self.allocator.take(size)

    def step(
        self, events: Sequence[tuple[int, int]], temporaries: Iterable[int], state: Iterable[int]
    ) -> None:
        """One step; ``state`` is made by its optimizer and stays."""
        allocator = self.allocator
        taken: dict[int, tuple[Block, int]] = {}
        for event, (number, size) in enumerate(events):
            if size:
                most = allocator.most
                taken[number] = allocator.take(size), size
                if allocator.most > most:
                    self.event, self.large = event, allocator.large
            elif number in taken:
                allocator.give_back(*taken.pop(number))
        most = allocator.most
        self.keep(state)
        beside = [(allocator.take(size), size) for size in filter(None, temporaries)]
        if allocator.most > most:
            self.event, self.large = len(events), allocator.large
        for block, size in (*beside, *taken.values()):
            allocator.give_back(block, size)
