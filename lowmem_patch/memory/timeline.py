"""The bytes of one training step on fake tensors, run by run of the blocks, which may have levels.

The sums are taken for each part of the step: a block's forward, what lies behind it up to the next (behind
the last one, head and loss), and a block's backward, with whatever is computed again in it.

In a list of equal blocks the bytes of each place grow by an equal amount with each block before it (what it
holds), and in the backward with each block behind it (its gradients). So of many equal blocks few are run,
and more are put in in the middle.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from lowmem_patch.memory.blocks import repeated_blocks, shortened
from lowmem_patch.memory.step import (
    AFTER_BACKWARD,
    AFTER_LOSS,
    BACKWARD,
    FORWARD,
    LOSS,
    MOMENTS,
    OPTIMIZER,
    LiveBytes,
    Part,
    watched_step,
)
from lowmem_patch.nn.checkpointing import is_checkpointed, keep_block
from lowmem_patch.nn.offloading import Offload
from lowmem_patch.strategies.checkpointing import Blocks, LevelPatch, patches_of
from lowmem_patch.strategies.protocol import Target
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow

T = TypeVar("T")
_PASSING = (FORWARD, LOSS, BACKWARD)
_DEPTH = 6  # blocks that are run, or one more: as many more are even


@dataclasses.dataclass(frozen=True)
class RunBytes:
    """Bytes of one run of a block.

    Attributes:
        own: allocated in its forward and alive when the forward of the model ends, but for its outputs.
        output: of its outputs, as far as it made them.
        output_lives: whether they are alive then.
        lasting, kept: allocated in its forward or behind it, up to the next, and alive when the forward of
            the model ends, or when its outputs are released, such as a cache of keys and values.
        copied, buffers: to host memory, if it is offloaded, and of the buffers that hold it there.
    """

    own: int
    output: int
    output_lives: bool
    lasting: int
    kept: int
    copied: int = 0
    buffers: int = 0

    @property
    def held(self) -> int:
        """Bytes that it holds when the forward ends."""
        return self.own + (self.output if self.output_lives else 0)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Bytes of one step; parameters, buffers and the optimizer's state are not counted, nor gradients of an
    earlier batch; those that the step makes are.

    Attributes:
        runs: of the blocks, in the order of the forward.
        parts: the largest sums of all storages alive at one time, by part of the step.
        outside: alive when the forward ends, and allocated in no run.
        held: alive when the forward ends.
        events: on a GPU, what its allocator is asked for (`LiveStorages`).
        begins: by part of the step, the number of the event with which it begins.
    """

    runs: tuple[RunBytes, ...]
    parts: Mapping[Part, int]
    outside: int
    held: int
    events: tuple[tuple[int, int], ...] = ()
    begins: tuple[tuple[int, Part], ...] = ()

    @property
    def end(self) -> int:
        """Bytes that are alive after the backward: the gradients."""
        return self.parts[AFTER_BACKWARD, 0]

    @property
    def peak(self) -> tuple[int, Part]:
        """The largest sum, and in which part, the optimizer's step excluded."""
        return max((size, part) for part, size in self.parts.items() if part[0] in _PASSING)

    def forward(self, number: int) -> int:
        """The largest sum in the forward of a run."""
        return self.parts[FORWARD, 2 * number + 1]

    def backward(self, number: int) -> int:
        """The largest sum in the backward of a run; 0 where nothing in front of its end trains."""
        return self.parts.get((BACKWARD, 2 * number + 1), 0)

    def behind(self, number: int) -> int:
        """The largest sum behind a run, up to the next, or up to the backward of the last one."""
        return max(self.parts.get((moment, 2 * number + 2), 0) for moment in _PASSING)

    def growth(self, number: int) -> tuple[int, int]:
        """How much larger the sums of the next run are, in forward and backward."""
        forward, backward = self.forward(number), self.backward(number)
        return self.forward(number + 1) - forward, self.backward(number + 1) - backward

    def part_of(self, event: int) -> Part:
        """The part of the step to which an event belongs."""
        return [part for begin, part in self.begins if begin <= event][-1]

    def moments(self, temporaries: Sequence[int] = ()) -> dict[str, int]:
        """The largest sum in each moment of the step, in their order.

        Args:
            temporaries: bytes that the optimizer's step takes, beside what the backward leaves.
        """
        found = {OPTIMIZER: self.end + sum(temporaries)}
        for (moment, _), size in self.parts.items():
            found[moment] = max(size, found.get(moment, 0))
        return {moment: found[moment] for moment in MOMENTS if moment in found}


def _timeline(live: LiveBytes) -> Timeline:
    """The timeline of a step that has just ended."""
    live.settle()
    alive = live.alive or {}
    runs = tuple(_run_bytes(live, number) for number in range(len(live.outputs)))
    outside = sum(size for size, place, _ in alive.values() if place % 2 == 0)
    held = sum(size for size, _, _ in alive.values())
    # what began as the loss may have become a part of the forward
    begins = (
        (event, part if part in live.parts else (FORWARD, part[1])) for event, part in live.begins
    )
    return Timeline(runs, live.parts, outside, held, tuple(live.events), tuple(begins))


def _run_bytes(live: LiveBytes, number: int) -> RunBytes:
    alive, made = live.alive or {}, live.outputs[number]
    inside, behind = 2 * number + 1, 2 * number + 2
    own = {key: size for key, (size, place, _) in alive.items() if place == inside}
    return RunBytes(
        sum(size for key, size in own.items() if key not in made),
        sum(made.values()),
        any(key in own for key in made),
        sum(size for size, place, _ in alive.values() if place in (inside, behind)),
        live.kept[inside] + live.kept[behind],
    )


def run_timeline(
    shadow: Shadow,
    sites: Sequence[str],
    settled: Callable[[], None] | None = None,
    *,
    accumulates: bool = False,
) -> Timeline:
    """One step of a shadow; the arguments are those of `watched_step`.

    Raises:
        TraceError: the forward or the backward fails.
    """
    with watched_step(shadow, sites, accumulates=accumulates, settled=settled) as live:
        return _timeline(live)


def run_levels(
    shadow: Shadow,
    blocks: Blocks,
    levels: Mapping[str, str],
    *,
    settled: bool = False,
    inputs: ExampleInputs | None = None,
    few: FewRuns | None = None,
    accumulates: bool = False,
) -> Timeline:
    """A step in which the blocks have these levels; afterwards they have none.

    Args:
        settled: no input is on its way to the host any more when the forward ends.
        inputs: in the place of the shadow's.
        few: only these blocks of a list are run.
        accumulates: as `run_timeline`.

    Raises:
        TraceError: the step fails.
    """
    model = shadow.model
    patches = patches_of(blocks, levels)
    if inputs is not None:
        shadow = dataclasses.replace(shadow, inputs=inputs)
    hosts = [patch.how.host for patch in patches if patch.how.host is not None]
    settle: Callable[[], None] | None = hosts[0].release if settled and hosts else None
    with only(few, model):
        target, there = Target(model), {name for name, _ in model.named_modules()}
        try:
            for patch in patches:
                if patch.site in there:
                    patch.apply(target)
            sites = [block.site for block in blocks.blocks]
            found = run_timeline(shadow, sites, settle, accumulates=accumulates)
            ran = [sites[run.block] for run in blocks.runs]
            return _with_copies(found, [site for site in ran if site in there], patches)
        finally:
            for module in filter(is_checkpointed, model.modules()):
                keep_block(module)


def _with_copies(
    timeline: Timeline, sites: Sequence[str], patches: Sequence[LevelPatch]
) -> Timeline:
    """The step with what its offloaded runs, of blocks at ``sites``, have copied."""
    last = {patch.site: patch.how.last for patch in patches if isinstance(patch.how, Offload)}
    if not last or len(sites) != len(timeline.runs):
        return timeline
    runs = [
        dataclasses.replace(run, copied=last[site].bytes, buffers=last[site].buffers)
        if site in last
        else run
        for run, site in zip(timeline.runs, sites, strict=True)
    ]
    return dataclasses.replace(timeline, runs=tuple(runs))


@dataclasses.dataclass(frozen=True)
class FewRuns:
    """Runs of equal blocks, of which few stand for all.

    Attributes:
        path: of the list of blocks.
        first: the number of the list's first run.
        depth, more: blocks of the list that are run, and that are not: an even number, if the levels of
            neighbours differ.
    """

    path: str
    first: int
    depth: int
    more: int

    @property
    def middle(self) -> int:
        """The run behind which more are put in; the next one is as it is."""
        return self.first + self.depth // 2 - 1

    def stands_for(self, number: int) -> int:
        """The run, of few, that is as this run of all is; even ones for even ones."""
        if number <= self.middle:
            return number
        beyond = number - self.middle
        return number - self.more if beyond > self.more else self.middle + beyond % 2

    def extended_runs(self, few: Sequence[T]) -> tuple[T, ...]:
        """What is known of each run of few, for each run of all."""
        count = len(few) + self.more
        return tuple(few[self.stands_for(number)] for number in range(count))

    def extended(self, few: Timeline) -> Timeline | None:
        """The step of all blocks; None where the few do not grow evenly."""
        middle, more, end = self.middle, self.more, self.first + self.depth
        one, two = few.runs[middle : middle + 2]
        # but the last block, for behind it there is no other
        growths = {few.growth(number) for number in range(middle, min(middle + 2, end - 2))}
        # the last ones may still wait for their copies to the host, and live: no growth of the others
        if len(growths) > 1 or one.own != two.own:
            return None
        ((grown, later),) = growths
        front = 2 * middle + 2  # the place behind the middle run

        def rise(moment: str, place: int) -> int:
            """By how much a part grows with each block that is put in."""
            if moment in (BACKWARD, AFTER_BACKWARD) and place <= front:
                return one.kept - later  # its gradients
            if moment in (AFTER_LOSS, BACKWARD):
                return one.kept
            if place <= front:
                return 0
            # some of what grows may last no longer than the list, as what its own model gives
            return one.lasting if place > 2 * end or moment == LOSS else grown

        parts = {}
        for (moment, place), size in few.parts.items():
            most = size + more * rise(moment, place)
            parts[moment, place + 2 * more * (place > front)] = most
            if place in (front - 1, front):
                each = later if moment == BACKWARD else grown
                for count in range(1, more + 1):
                    parts[moment, place + 2 * count] = most + count * each
        runs = (*few.runs[: middle + 1], *(more * (one,)), *few.runs[middle + 1 :])
        held = few.held + more * one.lasting
        return Timeline(runs, parts, few.outside, held)


def only(few: FewRuns | None, model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Only the few blocks while the context is open; all where there are no few."""
    return shortened(model, few.path, few.depth) if few else contextlib.nullcontext()


def few_of(model: nn.Module) -> FewRuns | None:
    """How few run of the model's largest list of equal blocks; None where all do. The first run is not known
    yet."""
    path = repeated_blocks(model)
    count = 0 if path is None else len(model.get_submodule(path)._modules)
    depth = _DEPTH + count % 2
    return FewRuns(path, 0, depth, count - depth) if path is not None and count > depth else None


def few_runs(model: nn.Module, blocks: Blocks, few: FewRuns | None) -> FewRuns | None:
    """The few with the number of their first run, where each block of the list runs once, one after the
    other, and few stand for many; or None.

    Args:
        model: that ran, also with these few blocks only.
    """
    if few is None:
        return None
    wanted = [f"{few.path}.{name}" for name in model.get_submodule(few.path)._modules]
    ran = [blocks.blocks[run.block].site for run in blocks.runs]
    first = ran.index(wanted[0]) if wanted[0] in ran else 0
    listed = {block.site: dataclasses.replace(block, site="") for block in blocks.blocks}
    equal = len({listed.get(site) for site in wanted}) == 1
    once = all(ran.count(site) == 1 for site in wanted)
    if not equal or not once or ran[first : first + len(wanted)] != wanted:
        return None
    return dataclasses.replace(few, first=first)
