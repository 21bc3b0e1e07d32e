"""The bytes of a step of a shadow on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lowmem_patch.memory.live_bytes import Part, PartBytes, most_of_moments
from lowmem_patch.memory.step import as_on_data, step_parts
from lowmem_patch.tracing.shadow import Shadow
from lowmem_patch.tracing.trace import trace_forward


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one step: its inputs and gradients included, parameters and optimizer state excluded.

    Attributes:
        saved: activations that autograd holds after the forward.
        weight_copies: low-precision copies of weights that it holds.
        parts: the largest sums of all storages alive at one time, by moment and place.
    """

    saved: int
    weight_copies: int
    parts: Mapping[Part, PartBytes]

    @property
    def moments(self) -> dict[str, int]:
        """The largest sum of each moment of the step, in their order."""
        return most_of_moments(self.parts)

    @property
    def peak(self) -> int:
        return max(self.moments.values())


def step_bytes(shadow: Shadow, *, optimizer: str = "adamw", accumulates: bool = False) -> StepBytes:
    """Run the forward, then a whole step, of a shadow in training mode; as ``step_parts``."""
    shadow.model.train()
    forward = dataclasses.replace(shadow, inputs=as_on_data(shadow.model, shadow.inputs))
    saved = trace_forward(forward, structure=False).saved
    parts = step_parts(shadow, optimizer=optimizer, accumulates=accumulates)
    return StepBytes(saved.activations, saved.weight_copies, parts)
