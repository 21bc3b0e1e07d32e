"""Steps of one model on fake tensors, whose blocks have levels, and the bytes that each needs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lowmem_patch.errors import ConfigError, TraceError
from lowmem_patch.memory.caching_allocator import allocated_in_step
from lowmem_patch.memory.model_states import Training
from lowmem_patch.memory.optimizers import temporaries_of
from lowmem_patch.memory.sharding import Sharding, gathered, gradients_of_runs, states_on_one
from lowmem_patch.memory.step import OPTIMIZER, Part
from lowmem_patch.memory.timeline import FewRuns, Timeline, few_of, few_runs, run_levels
from lowmem_patch.nn.checkpointing import SWITCHES, is_switched_on
from lowmem_patch.nn.gammas import assume_gammas
from lowmem_patch.strategies.checkpointing import find_blocks
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Need:
    """The bytes that one step needs at its peak: as counted on a CPU, as a GPU's allocator gives them there.

    Attributes:
        total: bytes, model states and all that follows included.
        part: in which the peak is.
        rounding: what the allocator rounds up.
        margin: what it may round up more, by what was allocated before.
        reserved: what it takes from the GPU; 0 where this is not known.
    """

    total: int
    part: Part
    rounding: int = 0
    margin: int = 0
    reserved: int = 0


class UnevenError(Exception):
    """Few blocks do not tell what many need."""


class Steps:
    """One model on fake tensors, as it is or patched, whose blocks are given levels.

    Args:
        model, shadow: unpatched, and its shadow.
        facts: of the unpatched shadow.
        training: of which its optimizer, what it holds and its GPUs count.
        short: of many equal blocks the shadow has these few.

    Raises:
        UnevenError: a short shadow does not tell of all.
        ConfigError: an unknown optimizer, or quantised weights on several GPUs.
    """

    def __init__(
        self,
        model: nn.Module,
        shadow: Shadow,
        facts: Facts,
        training: Training,
        short: FewRuns | None = None,
    ) -> None:
        if training.gpus > 1 and (training.quantised or shadow.packed or shadow.beside):
            raise ConfigError(
                "quantised weights are not counted on several GPUs: use lora, or one GPU"
            )
        self.shadow, self.training = shadow, training
        self.blocks, self.states = find_blocks(facts), states_on_one(model, training)
        self.earlier = self.states.gradients if training.accumulates else 0
        self.resident = self.states.resident + self.earlier
        self.free = [
            block
            for block in self.blocks.blocks
            if not block.refusal and not self._is_switched_on(block.site)
        ]
        self.temporaries = temporaries_of(
            model, training.optimizer, training.gpus, elsewhere=shadow.elsewhere
        )
        self.few = few_runs(shadow.model, self.blocks, short or few_of(shadow.model))
        self._short = short is not None
        self._known: dict[Any, Timeline] = {}
        if self._short and self.few is None:
            raise UnevenError
        self.sharding: Sharding | None = None
        if training.gpus > 1:
            gradients = self.of_all(gradients_of_runs(model, self.blocks))
            self.sharding = Sharding(
                training.gpus, gathered(model), gradients, training.accumulates
            )
        assume_gammas(model, shadow.model, gathered=training.gpus > 1)

    def of_all(self, runs: Sequence[T]) -> tuple[T, ...]:
        """What is known of each run of the shadow, for each run of the model."""
        return self.few.extended_runs(runs) if self._short and self.few else tuple(runs)

    def _is_switched_on(self, site: str) -> bool:
        """Whether another library's checkpointing is on in the block or around it."""
        modules = dict(self.shadow.model.named_modules())
        parts = site.split(".")
        around = [modules[".".join(parts[:length])] for length in range(len(parts))]
        return is_switched_on(modules[site]) or any(
            module.__dict__.get(name) for module in around for name in SWITCHES
        )

    def run(
        self,
        levels: Mapping[str, str],
        *,
        settled: bool = False,
        inputs: ExampleInputs | None = None,
        few: FewRuns | None = None,
    ) -> Timeline:
        """As `run_levels`; a step that was run is remembered, for it costs most of what a fit costs."""
        key = frozenset(levels.items()), settled, few, self.blocks.lag
        if inputs is None and key in self._known:
            return self._known[key]
        accumulates = self.training.accumulates
        found = run_levels(
            self.shadow, self.blocks, levels, settled=settled, inputs=inputs, few=few, accumulates=accumulates
        )  # fmt: skip
        found = found if few else self._of_one(found)
        return self._known.setdefault(key, found) if inputs is None else found

    def all_at(self, level: str) -> dict[str, str]:
        """This level for every block that may have one."""
        return {block.site: level for block in self.free}

    def profile(self, level: str, inputs: ExampleInputs | None = None) -> Timeline:
        """A step in which all blocks that are free have one level: of few of them, where that tells all.

        Raises:
            UnevenError: a short shadow does not tell of all.
            TraceError: the step fails.
        """
        levels = self.all_at(level)
        if self.few is not None:
            # not every model runs with fewer blocks, nor with other inputs
            with contextlib.suppress(*(() if inputs is not None else (TraceError,))):
                found = self.few.extended(self.run(levels, few=self.few, inputs=inputs))
                if found is not None:
                    return self._of_one(found)
            self.few = None
        if self._short:
            raise UnevenError
        return self.run(levels, inputs=inputs)

    def _of_one(self, timeline: Timeline) -> Timeline:
        return timeline if self.sharding is None else self.sharding.of_one(timeline)

    def need(self, timeline: Timeline) -> Need:
        """What a step needs. Where a GPU's requests are not known, as of a step told by few blocks, the
        rounding of activations and gradients is missing."""
        peak, part = timeline.peak
        end = timeline.end + sum(self.temporaries)
        if end > peak:
            peak, part = end, (OPTIMIZER, 0)
        states = self.states
        counted = states.counted + peak + self.earlier
        if not timeline.events:
            return Need(counted + states.rounding, part, states.rounding)
        found = allocated_in_step(
            states.before_steps(self.training.accumulates), states.of_optimizer, timeline.events,
            self.temporaries,
        )  # fmt: skip
        in_backward = found.event < len(timeline.events)
        part = timeline.part_of(found.event) if in_backward else (OPTIMIZER, 0)
        total = found.bytes + found.margin
        return Need(total, part, found.bytes - counted, found.margin, found.reserved)

    def beside(self, timeline: Timeline) -> int:
        """Bytes of a step beside what is held for the whole of training."""
        return self.need(timeline).total - self.resident
