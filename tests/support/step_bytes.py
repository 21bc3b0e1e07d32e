"""The bytes of a step of a shadow on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lowmem_patch.memory.optimizers import temporaries_of
from lowmem_patch.memory.timeline import run_timeline
from lowmem_patch.tracing.shadow import Shadow
from lowmem_patch.tracing.trace import trace_forward


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one step: its inputs and gradients included, parameters and optimizer state excluded.

    Attributes:
        saved: activations that autograd holds after the forward.
        weight_copies: low-precision copies of weights that it holds.
        moments: the largest sum of all storages alive at one time, in each moment of the step, on a GPU.
    """

    saved: int
    weight_copies: int
    moments: Mapping[str, int]

    @property
    def peak(self) -> int:
        return max(self.moments.values())


def step_bytes(shadow: Shadow, *, optimizer: str = "adamw", accumulates: bool = False) -> StepBytes:
    """Run the forward, then a whole step, of a shadow in training mode; as ``watched_step``."""
    shadow.model.train()
    saved = trace_forward(shadow, structure=False).saved
    trained = [p for p in shadow.model.parameters() if p.requires_grad]
    timeline = run_timeline(shadow, (), accumulates=accumulates)
    earlier = sum(parameter.nbytes for parameter in trained) if accumulates else 0
    moments = timeline.moments(temporaries_of(shadow.model, optimizer, elsewhere=True))
    moments = {name: size + earlier for name, size in moments.items()}
    return StepBytes(saved.activations, saved.weight_copies, moments)
