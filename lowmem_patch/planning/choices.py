"""What steps on fake tensors say of each run of a block, and what it may do, in bytes and seconds: what the
solver chooses from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median

from lowmem_patch.memory.timeline import Timeline
from lowmem_patch.nn.host_memory import buffer_bytes
from lowmem_patch.planning.costs import Device, RunSeconds
from lowmem_patch.planning.solve import Choice, Step
from lowmem_patch.strategies.checkpointing import Blocks

_OVERLAP = 0.04  # of a copy's time is seen though it runs beside the computation
_LONGEST = 4  # runs that a copy to the host may take
_HOST_SECONDS = 1.5e-3  # of Python, for the copies of one run
_SPARE = 0.1  # of a run's time in which Python may do more, and no kernel waits


class _Sums:
    """What one profile says of each run, less what the runs before it hold in that profile."""

    def __init__(self, timeline: Timeline, outside: int) -> None:
        self.timeline = timeline
        self.own = [run.own for run in timeline.runs]
        if self.own:
            self.own[0] += timeline.outside - outside  # its input
        self.outputs = [run.held - run.own for run in timeline.runs]

    def choice(self, level: str, number: int, seconds: float) -> Choice:
        own = sum(self.own[:number])
        forward = self.timeline.forward(number) - own - sum(self.outputs[: max(0, number - 1)])
        backward = self.timeline.backward(number) - own - sum(self.outputs[:number])
        return Choice(level, self.own[number], forward, backward, seconds)

    def behind(self, number: int) -> int:
        own = sum(self.own[: number + 1])
        return self.timeline.behind(number) - own - sum(self.outputs[:number])


def input_sizes(timeline: Timeline) -> list[int]:
    """Bytes of each run's input, as what the run before gives; the first one's is taken to be like its own
    output."""
    return [timeline.runs[max(0, number - 1)].output for number in range(len(timeline.runs))]


def more_seconds(level: str, one: RunSeconds, size: int = 0, device: Device | None = None) -> float:
    """Seconds of a step that one run takes more at a level than as patched.

    Args:
        size: bytes of its input.
        device: for the copies to the host and back.
    """
    if level == "patched":
        return 0.0
    if level == "attention":
        return max(0.0, one.again - one.attention)
    if level != "host" or device is None:
        return one.again
    copy = size / device.host
    stall = max(0.0, copy - one.forward) + max(0.0, copy - one.forward - one.backward)
    return one.again + stall + _OVERLAP * 2 * copy


@dataclasses.dataclass
class Choices:
    """The levels that the runs of a model's blocks may have.

    Attributes:
        blocks: of the model.
        free: sites of those that may have another level than patched.
        profiles: a step with all free blocks at a level.
        keeps_output, keeps_input: whether a patched run holds these.
        seconds: of each run.
        device: whose times they are.
        host: bytes of host memory that may be used.
    """

    blocks: Blocks
    free: set[str]
    profiles: Mapping[str, Timeline]
    keeps_output: Sequence[bool]
    keeps_input: Sequence[bool]
    seconds: Sequence[RunSeconds]
    device: Device
    host: int

    def __post_init__(self) -> None:
        self.sites = [self.blocks.blocks[run.block].site for run in self.blocks.runs]
        least = min(timeline.outside for timeline in self.profiles.values())
        self.sums = {level: _Sums(timeline, least) for level, timeline in self.profiles.items()}
        self.inputs = input_sizes(self.profiles["patched"])
        self.on_hosts = [buffer_bytes(size) if size else 0 for size in self.inputs]
        away = self.profiles.get("offloaded", self.profiles["patched"]).runs
        self.saved = [run.copied for run in away]
        self.buffers = [run.buffers for run in away]

    @property
    def lag(self) -> int:
        """Runs that the copy of what a usual one saves takes."""
        runs = zip(self.saved, self.seconds, strict=True)
        times = [size / self.device.host / one.forward for size, one in runs if one.forward]
        # it begins in the middle of its run
        return min(_LONGEST, max(1, math.ceil(median(times) + 0.25))) if times else 1

    def on_host(self, levels: Mapping[str, str]) -> int:
        """Bytes of host memory that levels by site take."""
        found = 0
        for number, site in enumerate(self.sites):
            if levels.get(site) == "host":
                found += self.on_hosts[number]
            if levels.get(site) == "offloaded" and self.blocks.awaits(number) is not None:
                found += self.buffers[number]
        return found

    def step(self, number: int) -> Step:
        """One run, and what it may do."""
        run, site = self.blocks.runs[number], self.sites[number]
        patched = self.sums["patched"].choice("patched", number, 0.0)
        choices = [patched]
        if site in self.free:
            inputs, outputs = self.keeps_input[number], self.keeps_output[number]
            choices = [dataclasses.replace(patched, keeps_input=inputs, keeps_output=outputs)]
            choices += [*self._recomputed(number), *self._offloaded(number)]
        # what is on its way to the host is seen when the choice is run
        behind = max(
            sums.behind(number)
            for level, sums in self.sums.items()
            if level not in ("host", "offloaded")
        )
        one = self.seconds[number]
        return Step(
            tuple(choices),
            self.profiles["patched"].runs[number].output,
            behind,
            run.block,
            run.links and site in self.free,
            one.again,
            one.forward,
        )

    def _recomputed(self, number: int) -> list[Choice]:
        seconds = self.seconds[number]
        plain, saved = (
            self.sums[level].choice(level, number, more_seconds(level, seconds))
            for level in ("checkpointed", "attention")
        )
        choices = [plain]
        if saved.own > plain.own and saved.seconds < plain.seconds:
            choices.append(saved)
        size = self.inputs[number]
        if size and sum(self.on_hosts[: number + 1]) <= self.host:
            more = more_seconds("host", seconds, size, self.device)
            away = self.sums["host"].choice("host", number, more)
            copy = size / self.device.host
            choices.append(dataclasses.replace(away, keeps_input=False, copy=copy))
        return choices

    def _offloaded(self, number: int) -> list[Choice]:
        """To offload what a run saves, where the host has room for it, for as much of all runs before it, and
        for the inputs of those behind it."""
        size = self.saved[number]
        on_host = sum(self.buffers[: number + 1]) + sum(self.on_hosts[number + 1 :])
        if not size or on_host > self.host or self.blocks.awaits(number) is None:
            return []
        copy, forward = size / self.device.host, self.seconds[number].forward
        # the host has time left where kernels take long
        spare = _SPARE * (forward + self.seconds[number].backward)
        more = max(_OVERLAP * 2 * copy, _HOST_SECONDS - spare)
        found = self.sums["offloaded"].choice("offloaded", number, more)
        return [
            dataclasses.replace(
                found,
                # in the profile, what the run before offloaded has come back
                backward=found.backward - (self.saved[number - 1] if number else 0),
                keeps_input=False,
                copy=copy,
                away=size,
                lag=self.blocks.lag,
                window=(self.blocks.lag - 0.5) * forward,
            )
        ]
