"""The timeline of a step of many equal blocks at one level, from a step of few of them.

In a list of equal blocks the bytes of each place grow by an equal amount with each block before it (what it
holds), and in the backward with each block behind it (its gradients). So more are put in behind the third.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from lowmem_patch.memory.blocks import repeated_blocks
from lowmem_patch.planning.timeline import RunBytes, Timeline
from lowmem_patch.strategies.checkpointing import Blocks

T = TypeVar("T")
_DEPTH = 6  # blocks that are run, or one more: as many more are even
_THIRD = 2


@dataclasses.dataclass(frozen=True)
class FewRuns:
    """Runs of equal blocks, of which few stand for all.

    Attributes:
        path: of the list of blocks.
        first: the number of the list's first run.
        depth, more: blocks of the list that are run, and that are not: an even number.
    """

    path: str
    first: int
    depth: int
    more: int

    def stands_for(self, number: int) -> int:
        """The run, of few, that is as this run of all is; even ones for even ones."""
        third = self.first + _THIRD
        if number <= third:
            return number
        return number - self.more if number > third + self.more else third + (number - third) % 2

    def extended_runs(self, few: Sequence[T]) -> tuple[T, ...]:
        """What is known of each run of few, for each run of all."""
        count = len(few) + self.more
        return tuple(few[self.stands_for(number)] for number in range(count))

    def extended(self, few: Timeline) -> Timeline | None:
        """The step of all blocks; None where the few do not grow evenly."""
        third, more = self.first + _THIRD, self.more
        one, two, three = few.runs[third : third + 3]
        held = one.own + (one.output if one.output_lives else 0)
        grown, later = _growth(one, two)
        gradients = held - later
        # the last ones may still wait for their copies to the host, and live: no growth of the others
        if _growth(two, three) != (grown, later) or one.own != two.own:
            return None
        front = [_moved(run, backward=more * gradients) for run in few.runs[: third + 1]]
        put_in = [
            _moved(front[-1], forward=count * grown, backward=count * (held - gradients))
            for count in range(1, more + 1)
        ]
        behind = [
            _moved(run, forward=more * grown, backward=more * held) for run in few.runs[third + 1 :]
        ]
        return dataclasses.replace(
            few,
            runs=(*front, *put_in, *behind),
            held=few.held + more * held,
            end=few.end + more * gradients,
            events=(),
            begins=(),
        )


def _growth(one: RunBytes, other: RunBytes) -> tuple[int, int]:
    return other.forward - one.forward, other.backward - one.backward


def _moved(run: RunBytes, *, forward: int = 0, backward: int = 0) -> RunBytes:
    return dataclasses.replace(
        run,
        forward=run.forward + forward,
        behind=run.behind + forward,
        backward=run.backward + backward,
    )


def few_of(path: str, count: int) -> FewRuns | None:
    """How few of ``count`` blocks in the list at ``path`` are run; None where all are. Its first run is not
    known yet."""
    depth = _DEPTH + count % 2
    return FewRuns(path, 0, depth, count - depth) if count > depth else None


def few_runs(model: nn.Module, blocks: Blocks, known: FewRuns | None = None) -> FewRuns | None:
    """The model's largest list of equal blocks, where each runs once, one after the other, and few stand for
    many; or None.

    Args:
        known: of a model that has these few blocks only.
    """
    path = repeated_blocks(model) if known is None else known.path
    if path is None:
        return None
    wanted = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]
    few = few_of(path, len(wanted)) if known is None else known
    ran = [blocks.blocks[run.block].site for run in blocks.runs]
    first = ran.index(wanted[0]) if wanted[0] in ran else 0
    listed = {block.site: dataclasses.replace(block, site="") for block in blocks.blocks}
    equal = len({listed.get(site) for site in wanted}) == 1
    once = all(ran.count(site) == 1 for site in wanted)
    if few is None or not equal or not once or ran[first : first + len(wanted)] != wanted:
        return None
    return dataclasses.replace(few, first=first)
