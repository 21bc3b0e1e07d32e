"""What steps on fake tensors say of each run of a block."""

from __future__ import annotations

from lowmem_patch.planning.costs import Device, RunSeconds
from lowmem_patch.planning.solve import Choice
from lowmem_patch.planning.timeline import Timeline

OVERLAP = 0.04  # of a copy's time is seen though it runs beside the computation


class Sums:
    """What one profile says of each run, less what the runs before it hold in that profile."""

    def __init__(self, timeline: Timeline, outside: int) -> None:
        self.runs = timeline.runs
        more = timeline.outside - outside  # the first block's input
        self.own = [run.own + (more if number == 0 else 0) for number, run in enumerate(self.runs)]
        self.outputs = [run.held - run.own for run in self.runs]

    def choice(self, level: str, number: int, seconds: float) -> Choice:
        run, own = self.runs[number], sum(self.own[:number])
        forward = run.forward - own - sum(self.outputs[: max(0, number - 1)])
        backward = run.backward - own - sum(self.outputs[:number])
        return Choice(level, self.own[number], forward, backward, seconds)

    def behind(self, number: int) -> int:
        own = sum(self.own[: number + 1])
        return self.runs[number].behind - own - sum(self.outputs[:number])


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
    return one.again + stall + OVERLAP * 2 * copy
