"""The bytes of a step of a shadow on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lowmem_patch.memory.optimizers import temporaries_of
from lowmem_patch.memory.step import Part, PartBytes, most_of_moments, watched_step
from lowmem_patch.tracing.shadow import Shadow
from lowmem_patch.tracing.trace import trace_forward


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one step: its inputs and gradients included, parameters and optimizer state excluded.

    Attributes:
        saved: activations that autograd holds after the forward.
        weight_copies: low-precision copies of weights that it holds.
        parts: the largest sums of all storages alive at one time, by moment and place.
        earlier: gradients of an earlier batch, which are in none of the parts.
        temporaries: of the optimizer's step, on a GPU.
    """

    saved: int
    weight_copies: int
    parts: Mapping[Part, PartBytes]
    earlier: int = 0
    temporaries: tuple[int, ...] = ()

    @property
    def moments(self) -> dict[str, int]:
        """The largest sum of each moment of the step, in their order."""
        moments = moments_of(self.parts, self.temporaries)
        return {name: size + self.earlier for name, size in moments.items()}

    @property
    def peak(self) -> int:
        return max(self.moments.values())


def moments_of(parts: Mapping[Part, PartBytes], temporaries: Sequence[int] = ()) -> dict[str, int]:
    return most_of_moments({part: size.peak for part, size in parts.items()}, temporaries)


def step_bytes(shadow: Shadow, *, optimizer: str = "adamw", accumulates: bool = False) -> StepBytes:
    """Run the forward, then a whole step, of a shadow in training mode; as ``watched_step``."""
    shadow.model.train()
    saved = trace_forward(shadow, structure=False).saved
    trained = [p for p in shadow.model.parameters() if p.requires_grad]
    with watched_step(shadow, accumulates=accumulates) as live:
        parts = live.result()
    earlier = sum(parameter.nbytes for parameter in trained) if accumulates else 0
    temporaries = temporaries_of(shadow.model, optimizer, elsewhere=True)
    return StepBytes(saved.activations, saved.weight_copies, parts, earlier, temporaries)
