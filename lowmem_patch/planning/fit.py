"""Fit: the least slow training step within a budget of bytes.

A step of the patched model runs on fake tensors. Where the budget does not hold it, so do steps with all
blocks at one level, and by turns, which gives what each run of a block holds and needs at each level.
`lowmem_patch.planning.solve` chooses from that, and the choice is run once more: the peak of that step, and
no sum, is what is predicted and held against the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping

from torch import nn

from lowmem_patch.errors import BudgetError
from lowmem_patch.memory.model_states import Training
from lowmem_patch.memory.step import BACKWARD, FORWARD, OPTIMIZER, Part
from lowmem_patch.memory.steps import Steps
from lowmem_patch.memory.timeline import FewRuns, Timeline
from lowmem_patch.planning.budget import Budget
from lowmem_patch.planning.choices import Choices
from lowmem_patch.planning.costs import device_of, run_seconds
from lowmem_patch.planning.fit_report import LEVEL_REASONS, FitReport, FittedBlock
from lowmem_patch.planning.names import size_text
from lowmem_patch.planning.solve import Step, least_limit, solve
from lowmem_patch.strategies.checkpointing import ALONE, LevelPatch, patches_of
from lowmem_patch.strategies.protocol import Facts, Patch
from lowmem_patch.tracing.shadow import Shadow

_TRIES = 6  # steps that are run to hold what the sums did not foresee
_SOLUTIONS = 64  # that are looked at
_WORTH = 0.01  # of the seconds that levels cost: less is worth no further step on fake tensors


Chosen = tuple[dict[str, str], Timeline]  # levels by site, and a step at them
NO_BLOCKS = "no repeated blocks were found that could be recomputed: all stays as patched"


class Fitting(Steps):
    """Steps of one patched model, from which levels of its blocks are chosen.

    Args:
        model, shadow, facts, training, short: as of `Steps`.
        patches: by which the times of runs change.
        host: bytes of host memory that levels may use.
    """

    def __init__(
        self,
        model: nn.Module,
        shadow: Shadow,
        facts: Facts,
        training: Training,
        short: FewRuns | None = None,
        *,
        patches: Iterable[Patch] = (),
        host: int = 0,
    ) -> None:
        super().__init__(model, shadow, facts, training, short)
        self.device, self.host = device_of(model), host
        self.seconds = self.of_all(run_seconds(facts, self.blocks, self.device, patches))

    @functools.cached_property
    def sites(self) -> list[str]:
        """Paths of the blocks."""
        return [block.site for block in self.blocks.blocks]

    @functools.cached_property
    def ran(self) -> list[str]:
        """Paths of the blocks, run by run."""
        return [self.sites[run.block] for run in self.blocks.runs]

    @functools.cached_property
    def patched(self) -> Timeline:
        """The step without any level.

        Raises:
            BudgetError: it runs other blocks than the trace.
        """
        found, traced = self.profile("patched"), len(self.blocks.runs)
        if len(found.runs) != traced:
            raise BudgetError(
                f"the model ran {traced} blocks in its trace and {len(found.runs)} in a training step, which "
                "cannot be planned: give example_inputs= with which both are the same"
            )
        return found

    @functools.cached_property
    def profiles(self) -> dict[str, Timeline]:
        """The step at each level; a budget that holds the patched one needs no other."""
        others = [level for level in ALONE if level != "patched"]
        if self.device.apart:
            others.append("offloaded")
        profiles = {level: self.profile(level) for level in others if self.free}
        return {"patched": self.patched} | profiles

    def _kept(self) -> tuple[list[bool], list[bool]]:
        """Whether a patched run holds its output, and its input: seen beside runs that hold nothing."""
        as_patched = [run.output_lives for run in self.patched.runs]
        outputs, inputs = list(as_patched), [False, *as_patched[:-1]]
        for parity in (0, 1):
            levels = {b.site: "host" for b in self.free if self.sites.index(b.site) % 2 == parity}
            found = self.run(levels, settled=True, few=self.few).runs
            for number, (one, other) in enumerate(itertools.pairwise(self.ran)):
                lives = found[self.few.stands_for(number) if self.few else number].output_lives
                if one not in levels and other in levels:
                    outputs[number] = lives
                elif one in levels and other not in levels:
                    inputs[number + 1] = lives
        return outputs, inputs

    # the sums

    @functools.cached_property
    def choices(self) -> Choices:
        free = {block.site for block in self.free}
        kept = self._kept() if self.free else ([], [])
        found = Choices(
            self.blocks, free, self.profiles, *kept, self.seconds, self.device, self.host
        )
        self.blocks = found.blocks = dataclasses.replace(self.blocks, lag=found.lag)
        return found

    @functools.cached_property
    def steps(self) -> list[Step]:
        return [self.choices.step(number) for number in range(len(self.ran))]

    # the choice

    @functools.cached_property
    def least(self) -> Chosen:
        """The levels of the least peak, and its step."""
        enough = max(timeline.peak[0] for timeline in self.profiles.values())
        limit = least_limit(self.steps, 2 * enough)
        solution = solve(self.steps, limit)
        assert solution is not None
        levels = dict(zip(self.ran, solution.levels, strict=True))
        found = levels, self.run(levels)
        # the sums of a mix may be above one level for all, whose step was run
        for level, profile in self.profiles.items():
            on_host = self.choices.on_host(self.all_at(level))
            if profile.peak[0] < found[1].peak[0] and on_host <= self.host:
                levels = self.all_at(level)
                found = min(found, (levels, self.run(levels)), key=lambda one: one[1].peak[0])
        return found

    def fit(self, budget: Budget, inputs: str) -> tuple[tuple[LevelPatch, ...], FitReport] | None:
        """The patches for a budget; None where no choice fits."""
        room = budget.bytes - self.resident
        room -= budget.reserve(max(room, 0))
        found = self._within(room) if room > 0 else None
        if found is None and self.beside(self.least[1]) <= room:
            found = self.least
        return None if found is None else self._fitted(*found, budget, inputs)

    def total(self, timeline: Timeline, budget: Budget) -> int:
        """Bytes of a step, what is left for fragmentation included."""
        return budget.total(self.resident, self.beside(timeline))

    def _within(self, room: int) -> Chosen | None:
        """The best choice whose step was run and takes no more than ``room`` bytes.

        The sums may say a little too much or too little: the limit that they are given moves until their
        choice fills the room.
        """
        patched = self.patched
        if patched.end + sum(self.temporaries) > room:
            return None
        if self.beside(patched) <= room:
            whole = self.run({}) if self.few else patched
            if self.beside(whole) <= room:
                return {}, whole
        best: Chosen | None = None
        seconds, limit = math.inf, room
        tried: set[tuple[str, ...]] = set()
        for _ in range(_SOLUTIONS):
            solution = solve(self.steps, limit)
            if solution is None or len(tried) == _TRIES:
                break
            if solution.levels in tried and best is None:
                limit -= max(1, room // _SOLUTIONS)
                continue
            if solution.levels in tried or solution.seconds > (1 - _WORTH) * seconds:
                break
            tried.add(solution.levels)
            levels = dict(zip(self.ran, solution.levels, strict=True))
            timeline = self.run(levels)
            left = room - self.beside(timeline)
            if left >= 0 and solution.seconds < seconds:
                best, seconds = (levels, timeline), solution.seconds
            limit += left
        return best

    def _fitted(
        self, levels: dict[str, str], timeline: Timeline, budget: Budget, inputs: str
    ) -> tuple[tuple[LevelPatch, ...], FitReport]:
        blocks = self._rows(levels, timeline)
        reasons = {block.site: block.reason for block in blocks}
        need = self.need(timeline)
        report = FitReport(
            asked=budget.asked,
            budget=budget.bytes,
            reserve=budget.reserve(max(0, budget.bytes - self.resident)),
            predicted=need.total,
            reserved=need.reserved,
            moment=self.name(need.part),
            parameters=self.states.parameters,
            optimizer_state=self.states.optimizer,
            workspace=self.states.workspace,
            rounding=need.rounding,
            margin=need.margin,
            gradients=self.states.gradients,
            held=timeline.held,
            optimizer=self.training.optimizer,
            accumulates=self.training.accumulates,
            device=self.device.name,
            extra_seconds=sum(block.seconds for block in blocks),
            step_seconds=sum(one.forward + one.backward for one in self.seconds),
            on_host=self.choices.on_host(levels) if levels else 0,
            inputs=inputs,
            blocks=blocks,
            notes=tuple(self._notes(levels)),
        )
        return patches_of(self.blocks, levels, reasons), report

    def name(self, part: Part) -> str:
        """As reports call a part of the step."""
        moment, place = part
        if moment == OPTIMIZER:
            return "the optimizer's step"
        if not place:
            way = f"the {BACKWARD if moment == BACKWARD else FORWARD}"
            return f"{way} before the blocks" if self.sites else way
        if place == 2 * len(self.blocks.runs):
            return "head and loss"
        site = self.ran[(place - 1) // 2]
        return f"the {moment} of {site}" if place % 2 else f"the forward behind {site}"

    def _rows(self, levels: Mapping[str, str], timeline: Timeline) -> tuple[FittedBlock, ...]:
        rows = []
        for number, site in enumerate(self.sites):
            runs = [i for i, run in enumerate(self.blocks.runs) if run.block == number]
            level = levels.get(site, "patched")
            patched = sum(self.patched.runs[i].held for i in runs)
            held = sum(timeline.runs[i].held for i in runs)
            seconds = sum(self.seconds_of(i, level) for i in runs)
            reason = self._reason(number, level)
            rows.append(FittedBlock(site, level, reason, patched, held, seconds))
        return tuple(rows)

    def seconds_of(self, number: int, level: str) -> float:
        """That a run takes more at a level."""
        if level == "patched":
            return 0.0
        step = self.steps[number]
        known = {choice.level: choice.seconds for choice in step.choices}
        if level in known:
            return known[level]
        return known["checkpointed"] + self.seconds[number].again  # of a segment

    def _reason(self, number: int, level: str) -> str:
        block = self.blocks.blocks[number]
        if block.refusal:
            return f"left as patched: {block.refusal}"
        if block not in self.free:
            return "left as patched: checkpointing that is on already recomputes it"
        return LEVEL_REASONS[level]

    def _notes(self, levels: Mapping[str, str]) -> list[str]:
        notes = []
        if not self.blocks.blocks:
            notes.append(NO_BLOCKS)
        if self.states.gradients and not self.training.accumulates:
            notes.append(
                "gradients count from the backward on, as after zero_grad(); with accumulation they take up "
                f"to {size_text(self.states.gradients)} more"
            )
        if set(levels.values()) - {"patched", "offloaded"}:
            notes.append(
                "in training, recomputed blocks get no empty cache of keys and values (use_cache), as with "
                "transformers' own checkpointing"
            )
        if set(levels.values()) - {"patched"}:
            notes.append(
                "under torch.compile its own checkpointing is used for these blocks, without host memory and "
                "segments"
            )
        if self.sharding is not None:
            whole = self.sharding.whole
            notes.append(
                f"bytes are those of one of {self.sharding.gpus} GPUs, over which FSDP2 shards model states "
                f"block by block; two blocks ({size_text(whole.block)} each) and all outside of them "
                f"({size_text(whole.rest)}) are gathered for a while. Times are without communication"
            )
        if self.states.buckets:
            notes.append(
                "processes of torch.distributed run: DDP's buckets are counted, a copy of the gradients of "
                f"{size_text(self.states.buckets)} (none with gradient_as_bucket_view=True); for FSDP2 give "
                "gpus="
            )
        return notes
