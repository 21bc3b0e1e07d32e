"""Model states over several GPUs, as FSDP2 shards them when each block is a group, and the rest another.

What a GPU holds whole for a while was read from the allocator of one of two H100s (torch 2.11), between the
hooks of the blocks: a buffer that is gathered into lies beside what is copied out of it, in the forward until
the next group is gathered; in the backward the next block is on its way while one is computed, and gradients
are put into a buffer that is reduced while the next block's are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lowmem_patch.memory.caching_allocator import rounding_bytes
from lowmem_patch.memory.model_states import ModelStates, StateSizes
from lowmem_patch.memory.step import BACKWARD, FORWARD, MOMENTS


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Bytes that a GPU holds whole for a while.

    Attributes:
        rest, block: parameters outside of the blocks, and of the largest block.
        rest_gradients, block_gradients: theirs.
    """

    rest: int
    rest_gradients: int
    block: int
    block_gradients: int

    @property
    def first(self) -> int:
        """Bytes when the first block is gathered: the buffer of the rest is not free yet."""
        return 2 * (self.rest + self.block)

    @property
    def between(self) -> int:
        """Bytes when a block is gathered: the buffer of the one before it is not free yet."""
        return self.rest + 3 * self.block

    @property
    def computing(self) -> int:
        """Bytes while a block is computed."""
        return self.rest + 2 * self.block

    def most(self, moment: str, place: int) -> int:
        """The rest from the first forward to the end of the backward; of the blocks the one that is
        computed, and the next, which is on its way. Gradients wait whole to be reduced.

        Args:
            moment, place: a `Part`.
        """
        if moment == FORWARD and place == 0:
            return self.first
        held = self.rest if moment in MOMENTS[: MOMENTS.index(BACKWARD) + 1] else 0
        if moment in (FORWARD, BACKWARD):
            held += 2 * self.block
        if moment == BACKWARD:
            held += self.rest_gradients + 2 * self.block_gradients
        return held


def gathered(model: nn.Module, blocks: str | None) -> Gathered:
    """``blocks``: the path of the list of repeated blocks; without one the model is one group."""
    children = [] if blocks is None else list(model.get_submodule(blocks).children())
    inside = {id(parameter) for block in children for parameter in block.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    sizes = [(_bytes(block.parameters()), _gradients(block.parameters())) for block in children]
    block, block_gradients = (
        (max(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    )
    return Gathered(_bytes(rest), _gradients(rest), block, block_gradients)


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _gradients(parameters: Iterable[Tensor]) -> int:
    return _bytes(parameter for parameter in parameters if parameter.requires_grad)


def states_of_one(states: ModelStates, gpus: int) -> ModelStates:
    """The shards of one GPU; rounded up, and what its allocator rounds up for them."""
    if gpus == 1:
        return states
    sizes = states.sizes
    shards = StateSizes(
        _shares(sizes.held, gpus),
        sizes.workspaces,
        _shares(sizes.gradients, gpus),
        _shares(sizes.optimizer, gpus),
        sizes.on_gpu,
    )
    names = ("parameters", "gradients", "optimizer")
    shares = dict(zip(names, _shares([getattr(states, n) for n in names], gpus), strict=True))
    rounding = rounding_bytes((*shards.held, *shards.optimizer)) if sizes.on_gpu else 0
    return dataclasses.replace(states, **shares, sizes=shards, rounding=rounding)


def is_replicated() -> bool:
    """Whether this is one of several processes, as under DDP."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def with_buckets(states: ModelStates) -> ModelStates:
    """Under DDP, whose buckets hold a copy of the gradients for the whole of training."""
    held = (*states.sizes.held, *states.sizes.gradients)
    return dataclasses.replace(
        states, sizes=dataclasses.replace(states.sizes, held=held), buckets=states.gradients
    )


def _shares(sizes: Iterable[int], gpus: int) -> tuple[int, ...]:
    return tuple(-(-size // gpus) for size in sizes)
