"""The bytes of one training step on fake tensors, run by run of the blocks, which may have levels.

The sums are taken for each part of the step: a block's forward, what lies behind it up to the next (behind
the last one, head and loss), and a block's backward, with whatever is computed again in it.

In a list of equal blocks the bytes of each place grow by an equal amount with each block before it (what it
holds), and in the backward with each block behind it (its gradients). So of many equal blocks few are run,
and more are put in in the middle.
"""

from __future__ import annotations

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
    watched_step,
)
from lowmem_patch.nn.checkpointing import is_checkpointed, keep_block
from lowmem_patch.nn.offloading import Offload
from lowmem_patch.strategies.checkpointing import Blocks, LevelPatch, patches_of
from lowmem_patch.strategies.protocol import Target
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow

Part = tuple[str, int]  # and the number of a run
T = TypeVar("T")
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
        forward, behind, backward: the largest sums of all storages alive in these parts of the step.
        copied, buffers: to host memory, if it is offloaded, and of the buffers that hold it there.
    """

    own: int
    output: int
    output_lives: bool
    lasting: int
    kept: int
    forward: int
    behind: int
    backward: int
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
        before, after: the largest sums before the first run, in the forward and in the backward.
        outside: alive when the forward ends, and allocated in no run.
        held: alive when the forward ends.
        last: the largest sums behind the last run, or of a step without runs, by moment: in the forward, in
            the loss and when it is there, and in the backward.
        end: alive after the backward: the gradients.
        events: on a GPU, what its allocator is asked for (`LiveStorages`).
        begins: by part of the step, the number of the event with which it begins.
    """

    runs: tuple[RunBytes, ...]
    before: int
    after: int
    outside: int
    held: int
    last: Mapping[str, int]
    end: int
    events: tuple[tuple[int, int], ...] = ()
    begins: tuple[tuple[int, Part], ...] = ()

    def part_of(self, event: int) -> Part:
        """The part of the step to which an event belongs."""
        return [part for begin, part in self.begins if begin <= event][-1]

    def moments(self, temporaries: Sequence[int] = ()) -> dict[str, int]:
        """The largest sum in each moment of the step, in their order.

        Args:
            temporaries: bytes that the optimizer's step takes, beside what the backward leaves.
        """
        found = dict(self.last)
        if self.runs:
            passed = [max(run.forward, run.behind) for run in self.runs[:-1]]
            passed += [self.before, self.runs[-1].forward]
            found[FORWARD] = max(found[FORWARD], *passed)
            found[BACKWARD] = max(found[BACKWARD], self.after, *(run.backward for run in self.runs))
        found |= {AFTER_BACKWARD: self.end, OPTIMIZER: self.end + sum(temporaries)}
        return {moment: found[moment] for moment in MOMENTS if moment in found}

    @property
    def peak(self) -> tuple[int, str, int]:
        """The largest sum, in which part, of which run."""
        parts = [(self.before, "before", 0), (self.after, "after", 0)]
        for number, run in enumerate(self.runs):
            parts += [
                (run.forward, "forward", number),
                (run.behind, "behind", number),
                (run.backward, "backward", number),
            ]
        return max(parts)


def _named(moment: str, place: int) -> Part:
    """The part of the runs that a part of `LiveBytes` is; behind the last run the backward begins."""
    if moment == BACKWARD and place % 2:
        return "backward", place // 2
    if not place:
        return ("after" if moment == BACKWARD else "before"), 0
    return ("forward", place // 2) if place % 2 else ("behind", place // 2 - 1)


def _timeline(live: LiveBytes) -> Timeline:
    """The timeline of a step that has just ended."""
    live.settle()
    most: dict[Part, int] = {}
    last: dict[str, int] = {}
    for (moment, place), size in live.parts.items():
        if moment in (FORWARD, LOSS, BACKWARD):
            part = _named(moment, place)
            most[part] = max(size, most.get(part, 0))
        if moment == AFTER_LOSS or (moment != AFTER_BACKWARD and place == 2 * len(live.outputs)):
            last[moment] = size
    alive = live.alive or {}
    runs = tuple(_run_bytes(live, number, most) for number in range(len(live.outputs)))
    outside = sum(size for size, place, _ in alive.values() if place % 2 == 0)
    held = sum(size for size, _, _ in alive.values())
    begins = tuple((event, _named(*part)) for event, part in live.begins)
    return Timeline(
        runs, most.get(("before", 0), 0), most.get(("after", 0), 0), outside, held, last,
        live.parts[AFTER_BACKWARD, 0], tuple(live.events), begins,
    )  # fmt: skip


def _run_bytes(live: LiveBytes, number: int, most: Mapping[Part, int]) -> RunBytes:
    alive, made = live.alive or {}, live.outputs[number]
    inside, behind = 2 * number + 1, 2 * number + 2
    own = {key: size for key, (size, place, _) in alive.items() if place == inside}
    return RunBytes(
        sum(size for key, size in own.items() if key not in made),
        sum(made.values()),
        any(key in own for key in made),
        sum(size for size, place, _ in alive.values() if place in (inside, behind)),
        live.kept[inside] + live.kept[behind],
        *(most.get((part, number), 0) for part in ("forward", "behind", "backward")),
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
    path, depth = (few.path, few.depth) if few else (None, None)
    with shortened(model, path, depth):
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
        middle, more = self.middle, self.more
        # but the last block, for behind it there is no other
        one, two, *three = few.runs[middle : min(middle + 3, self.first + self.depth - 1)]
        lasting, kept, (grown, later) = one.lasting, one.kept, _growth(one, two)
        gradients = kept - later
        # the last ones may still wait for their copies to the host, and live: no growth of the others
        uneven = any(_growth(two, run) != (grown, later) for run in three)
        if uneven or one.own != two.own:
            return None
        front = [_moved(run, backward=more * gradients) for run in few.runs[: middle + 1]]
        put_in = [
            _moved(front[-1], forward=count * grown, backward=count * later)
            for count in range(1, more + 1)
        ]
        # some of what grows may last no longer than the list, as what its own model gives
        behind = [
            _moved(
                run, forward=more * (grown if place < self.depth else lasting), backward=more * kept
            )
            for place, run in enumerate(few.runs[middle + 1 :], middle + 1 - self.first)
        ]
        return dataclasses.replace(
            few,
            runs=(*front, *put_in, *behind),
            after=few.after + (more * gradients if few.after else 0),
            held=few.held + more * lasting,
            last={
                moment: size + more * (lasting if moment in (FORWARD, LOSS) else kept)
                for moment, size in few.last.items()
            },
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
