"""The timeline of one of several GPUs, over which FSDP2 shards the model states.

A step on fake tensors holds all weights (which a timeline does not count) and all gradients. One of n GPUs
holds the n-th part of a block's gradients once that block's backward is over, and what is gathered.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from lowmem_patch.memory.blocks import repeated_blocks
from lowmem_patch.memory.model_states import Training
from lowmem_patch.memory.sharding import Gathered, gathered
from lowmem_patch.planning.timeline import Timeline
from lowmem_patch.strategies.checkpointing import Blocks

# one part in so many of what is gathered: padded shards, and what the allocator rounds up
_SPARE = 200


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
        return dataclasses.replace(
            timeline,
            runs=tuple(runs),
            before=timeline.before + whole.first + spare,
            after=max(timeline.after, timeline.end)
            - self._less(sum(self.gradients))
            + at_the_end
            + spare,
            end=-(-timeline.end // self.gpus),
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
