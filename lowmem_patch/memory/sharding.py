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
from lowmem_patch.memory.caching_allocator import rounding_bytes
from lowmem_patch.memory.model_states import ModelStates, StateSizes, Training, model_state_bytes
from lowmem_patch.memory.step import BACKWARD, FORWARD
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
    def between(self) -> int:
        """Bytes when a block is gathered: the buffer of the one before it is not free yet."""
        return self.rest + 3 * self.block

    @property
    def computing(self) -> int:
        """Bytes while a block is computed."""
        return self.rest + 2 * self.block

    @property
    def backward(self) -> int:
        """Bytes in a backward, at most, of which no more is known: gradients wait whole to be reduced."""
        return self.computing + self.rest_gradients + 2 * self.block_gradients


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


def states_on_one(model: nn.Module, training: Training) -> ModelStates:
    """The model states of one GPU: its shards, or all with DDP's buckets, which hold a copy of the gradients
    for the whole of training.

    Raises:
        ConfigError: an unknown optimizer.
    """
    states = model_state_bytes(model, training.optimizer, quantised=training.quantised)
    if training.gpus > 1 or not is_replicated():
        return states_of_one(states, training.gpus)
    held = (*states.sizes.held, *states.sizes.gradients)
    return dataclasses.replace(
        states, sizes=dataclasses.replace(states.sizes, held=held), buckets=states.gradients
    )


def _shares(sizes: Iterable[int], gpus: int) -> tuple[int, ...]:
    return tuple(-(-size // gpus) for size in sizes)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a model lies on several GPUs.

    Attributes:
        gpus: their number.
        whole: what one gathers.
        gradients: bytes of each run's block, as far as it is a group of its own and ends with this run.
        accumulates: a step adds to gradients of earlier batches, and holds none of its own.
    """

    gpus: int
    whole: Gathered
    gradients: tuple[int, ...]
    accumulates: bool

    def of_one(self, timeline: Timeline) -> Timeline:
        """What one GPU holds, its shards of parameters and of the optimizer's state excluded."""
        whole, last = self.whole, len(timeline.runs) - 1
        spare = whole.computing // _SPARE
        runs = []
        for number, run in enumerate(timeline.runs):
            later = sum(self.gradients[number + 1 :])
            # behind the last block there are head and loss; then that block is gathered again
            gap = whole.between if number < last else whole.rest + whole.block
            waiting = whole.block_gradients if number < last else 0  # in the buffer that is reduced
            waiting += whole.rest_gradients if self.accumulates else 0
            runs.append(
                dataclasses.replace(
                    run,
                    forward=run.forward + whole.computing + spare,
                    behind=run.behind + gap + spare,
                    backward=run.backward - self._less(later) + whole.computing + waiting + spare,
                )
            )
        # the rest is given back before its gradients are put into the buffer that is reduced
        at_the_end = max(whole.rest + whole.block, whole.rest_gradients)
        at_the_end += whole.rest_gradients if self.accumulates else 0
        gradients = sum(self.gradients)
        # with what is held behind the last run
        beside = dict.fromkeys(timeline.last, whole.rest + whole.block)
        if not runs:
            beside |= {FORWARD: whole.first, BACKWARD: at_the_end}
        return dataclasses.replace(
            timeline,
            runs=tuple(runs),
            before=timeline.before + whole.first + spare,
            after=max(timeline.after, timeline.end) - self._less(gradients) + at_the_end + spare,
            last={moment: size + beside[moment] + spare for moment, size in timeline.last.items()},
            end=max(
                -(-timeline.end // self.gpus),
                timeline.end - self._less(gradients + whole.rest_gradients),
            ),
            events=(),
            begins=(),
        )

    def _less(self, gradients: int) -> int:
        """What lies on other GPUs of whole gradients."""
        return 0 if self.accumulates else gradients - -(-gradients // self.gpus)


def sharding_of(model: nn.Module, blocks: Blocks, training: Training) -> Sharding | None:
    """Each repeated block is a group of FSDP2, and the rest another; None for one GPU."""
    if training.gpus == 1:
        return None
    path = repeated_blocks(model)
    group = "" if path is None else f"{path}."
    sizes, seen = [], set()
    for run in blocks.runs:
        site = blocks.blocks[run.block].site
        own = bool(group) and site.startswith(group) and site not in seen
        seen.add(site)
        block = model.get_submodule(site)
        sizes.append(sum(p.nbytes for p in block.parameters() if p.requires_grad) if own else 0)
    return Sharding(training.gpus, gathered(model, path), tuple(sizes), training.accumulates)
