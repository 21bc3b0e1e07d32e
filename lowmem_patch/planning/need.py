"""The bytes that a training step needs: as counted on a CPU, as a GPU's allocator gives them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lowmem_patch.memory.allocated import allocated_in_step
from lowmem_patch.memory.model_states import ModelStates, Training
from lowmem_patch.planning.timeline import Timeline

OPTIMIZER_STEP = "optimizer step"


@dataclasses.dataclass(frozen=True)
class Need:
    """What one step needs at its peak.

    Attributes:
        total: bytes, model states and all that follows included.
        part, run: of the timeline, or the optimizer's step.
        rounding: what the allocator rounds up.
        margin: what it may round up more, by what was allocated before.
        reserved: what it takes from the GPU; 0 where this is not known.
    """

    total: int
    part: str
    run: int
    rounding: int = 0
    margin: int = 0
    reserved: int = 0


def need_of(
    timeline: Timeline, states: ModelStates, training: Training, temporaries: Sequence[int]
) -> Need:
    """What a step needs. Where a GPU's requests are not known, as of a step told by few blocks, the
    rounding of activations and gradients is missing.

    Args:
        temporaries: of the optimizer's step.
    """
    peak, part, run = timeline.peak
    end = timeline.end + sum(temporaries)
    if end > peak:
        peak, part = end, OPTIMIZER_STEP
    counted = states.counted + peak + (states.gradients if training.accumulates else 0)
    if not timeline.events:
        return Need(counted + states.rounding, part, run, states.rounding)
    found = allocated_in_step(
        states.sizes, timeline.events, accumulates=training.accumulates, temporaries=temporaries
    )
    part, run = timeline.part_of(found.event)
    if found.event == len(timeline.events):
        part = OPTIMIZER_STEP
    return Need(found.bound, part, run, found.bytes - counted, found.margin, found.reserved)
