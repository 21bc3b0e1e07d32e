"""One of several GPUs, over which FSDP2 shards the model states: each block is a group, and the rest another.

A step on fake tensors holds all weights (which a timeline does not count) and all gradients. One of n GPUs
holds the n-th part of a block's gradients once that block's backward is over, and what is gathered.

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

from lowmem_patch.memory.blocks import repeated_blocks
from lowmem_patch.memory.model_states import ModelStates, Training, model_state_bytes
from lowmem_patch.memory.step import AFTER_BACKWARD, AFTER_LOSS, BACKWARD, FORWARD, LOSS
from lowmem_patch.memory.timeline import Timeline
from lowmem_patch.strategies.checkpointing import Blocks

# one part in so many of what is gathered: padded shards, and what the allocator rounds up
_SPARE = 200


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
    def computing(self) -> int:
        """Bytes while a block is computed."""
        return self.rest + 2 * self.block


def gathered(model: nn.Module) -> Gathered:
    """What one of several GPUs gathers; without repeated blocks the model is one group."""
    blocks = repeated_blocks(model)
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


def is_replicated() -> bool:
    """Whether this is one of several processes, as under DDP."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def states_on_one(model: nn.Module, training: Training) -> ModelStates:
    """The model states of one GPU: its shards, or all with DDP's buckets, which hold a copy of the gradients
    for the whole of training.

    Raises:
        ConfigError: an unknown optimizer.
    """
    states = model_state_bytes(model, training.optimizer, quantised=training.quantised)
    buckets = states.gradients if training.gpus == 1 and is_replicated() else 0
    return dataclasses.replace(states, gpus=training.gpus, buckets=buckets)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a model lies on several GPUs.

    Attributes:
        gpus: their number.
        whole: what one gathers.
        gradients: of each run, as of `gradients_of_runs`.
        accumulates: a step adds to gradients of earlier batches, and holds none of its own.
    """

    gpus: int
    whole: Gathered
    gradients: tuple[int, ...]
    accumulates: bool

    def of_one(self, timeline: Timeline) -> Timeline:
        """What one GPU holds, its shards of parameters and of the optimizer's state excluded."""
        spare, last = self.whole.computing // _SPARE, 2 * len(timeline.runs)
        parts = {
            part: size + self._more(*part, last) + spare
            for part, size in {(BACKWARD, 0): timeline.end, **timeline.parts}.items()
        }
        less = self._less(sum(self.gradients) + self.whole.rest_gradients)
        parts[AFTER_BACKWARD, 0] = max(-(-timeline.end // self.gpus), timeline.end - less)
        return dataclasses.replace(timeline, parts=parts, events=(), begins=())

    def _more(self, moment: str, place: int, last: int) -> int:
        """What one GPU holds more in a part of the step than without others.

        Args:
            last: the place behind the last run.
        """
        whole, earlier = self.whole, self.whole.rest_gradients if self.accumulates else 0
        if moment == BACKWARD and place % 2:
            later = self._less(sum(self.gradients[place // 2 + 1 :]))
            # in the buffer that is reduced
            waiting = whole.block_gradients if place + 1 < last else 0
            return whole.computing + waiting + earlier - later
        if moment == BACKWARD and not place:
            # the rest is given back before its gradients are put into the buffer that is reduced
            at_the_end = max(whole.rest + whole.block, whole.rest_gradients)
            return at_the_end + earlier - self._less(sum(self.gradients))
        # in front of the first group of a block, or where there is none, the rest's buffer is not free yet
        if moment in (FORWARD, LOSS) and not (place and whole.block):
            return whole.first
        # behind the last block there are head and loss; then that block is gathered again
        if moment == AFTER_LOSS or place == last:
            return whole.rest + whole.block
        # when a block is gathered, the buffer of the one before it is not free yet
        return whole.computing + (0 if place % 2 else whole.block)

    def _less(self, gradients: int) -> int:
        """What lies on other GPUs of whole gradients."""
        return 0 if self.accumulates else gradients - -(-gradients // self.gpus)


def gradients_of_runs(model: nn.Module, blocks: Blocks) -> tuple[int, ...]:
    """Bytes of each run's block, as far as it is a group of its own and its backward ends with this run."""
    path = repeated_blocks(model)
    sizes, seen = [], set()
    for site in (blocks.blocks[run.block].site for run in blocks.runs):
        own = path is not None and site.startswith(f"{path}.") and site not in seen
        seen.add(site)
        sizes.append(_gradients(model.get_submodule(site).parameters()) if own else 0)
    return tuple(sizes)
