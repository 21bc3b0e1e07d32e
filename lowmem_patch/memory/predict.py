"""The peak of a training step before and after a patch, and the largest batch or length that fits.

A model of many equal blocks is run with two, three and four of them (`lowmem_patch.memory.blocks`):
the bytes of each place in the step grow by an equal amount with each block, and the third block proves
it. Other models are run whole. Batch sizes and lengths are never extrapolated: a size that is said to
fit was run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import ConfigError
from lowmem_patch.memory.blocks import DEPTHS, extended, repeated_blocks, shortened
from lowmem_patch.memory.few_blocks import Plans, make_plans
from lowmem_patch.memory.model_states import USUAL_TRAINING, Training, model_state_bytes
from lowmem_patch.memory.optimizers import temporaries_of
from lowmem_patch.memory.sharding import gathered, states_of_one
from lowmem_patch.memory.step import (
    BACKWARD,
    FORWARD,
    Part,
    PartBytes,
    most_of_moments,
    watched_step,
)
from lowmem_patch.planning.apply import apply_plan
from lowmem_patch.planning.planner import plan_model
from lowmem_patch.tracing.base_model import base_model, switch_checkpointing_on, text_config
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow, fake_inputs, make_shadow

_LARGEST = {"batch": 1 << 20, "length": 1 << 24}

MakeInputs = Callable[[int, int | None], ExampleInputs]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of a training step on one GPU.

    Attributes:
        parameters, optimizer: held for the whole of training.
        gradients: of all parameters that train, held from the backward (with accumulation, from the
            beginning) to the optimizer's step.
        saved: activations that autograd holds between forward and backward, without checkpointing.
        weight_copies: low-precision copies of weights that autograd holds.
        workspace: on a GPU, of cuBLAS, and what the allocator rounds up for parameters and optimizer state.
        moments: all bytes that are held at one time, at most, in each moment of the step: ``forward``,
            ``loss``, ``after the loss``, ``backward``, ``after the backward``, ``optimizer step``.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    weight_copies: int
    workspace: int
    moments: Mapping[str, int]

    @property
    def total(self) -> int:
        """The peak."""
        return max(self.moments.values())

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda moment: self.moments[moment])

    def to_dict(self) -> dict[str, Any]:
        sums = {"peak_moment": self.peak_moment, "total": self.total}
        return {**dataclasses.asdict(self), **sums}


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Predicted memory for one batch and length, and the largest size that fits.

    Attributes:
        before, after: the unpatched and the patched model.
        training: what was assumed.
        batch_size, length: of the prediction; length is None where the model reads no tokens.
        limit: bytes that may be used, if one was given.
        solved: ``batch`` or ``length``, the size that was solved for.
        largest_before, largest_after: the largest such size within the limit; 0: not even 1 fits.
        least_before, least_after: bytes that the size 1 takes, where a limit was given.
        bound: a largest size that the model itself allows (positions), if it has one.
    """

    before: Footprint
    after: Footprint
    training: Training
    batch_size: int
    length: int | None
    limit: int | None = None
    solved: str = "batch"
    largest_before: int | None = None
    largest_after: int | None = None
    bound: int | None = None
    least_before: int | None = None
    least_after: int | None = None

    def to_dict(self) -> dict[str, Any]:
        data = {**dataclasses.asdict(self), "optimizer": self.training.optimizer}
        return {**data, "before": self.before.to_dict(), "after": self.after.to_dict()}


@dataclasses.dataclass
class _Predictor:
    """Steps of one model, as it is or patched, at any size."""

    model: nn.Module
    plans: Plans
    make_inputs: MakeInputs
    patched: bool
    training: Training = USUAL_TRAINING

    def __post_init__(self) -> None:
        self.blocks = self.plans.blocks
        self.shadows: dict[int | None, Shadow] = {}
        self.known: dict[tuple[int, int | None], Mapping[Part, PartBytes]] = {}

    def _make_shadow(self, depth: int | None, inputs: ExampleInputs) -> Shadow:
        plan, known = self.plans.plans.get(depth, (None, None)) if self.patched else (None, None)
        # checkpointing stays switched on in a copy: another prediction may be without
        if known is not None and known.mode is not None and not self.training.checkpointing:
            return known
        with shortened(self.model, self.blocks, depth):
            shadow = make_shadow(self.model, inputs)
        if self.patched:
            if plan is None:
                plan = plan_model(self.model, self.plans.report.config, inputs).plan
            apply_plan(shadow.model, plan, arithmetic=False)
        if self.training.checkpointing and not switch_checkpointing_on(shadow.model):
            name = type(base_model(self.model)).__name__
            raise ConfigError(f"{name} has no activation checkpointing of its own to switch on")
        return shadow

    def _step(self, depth: int | None, inputs: ExampleInputs) -> Mapping[Part, PartBytes]:
        if depth not in self.shadows:
            self.shadows[depth] = self._make_shadow(depth, inputs)
        shadow = self.shadows[depth]
        assert shadow.mode is not None
        fakes = fake_inputs(inputs, shadow.mode, torch.device("cpu"))
        blocks = () if self.blocks is None else shadow.model.get_submodule(self.blocks)._modules
        with watched_step(
            dataclasses.replace(shadow, inputs=fakes), [f"{self.blocks}.{name}" for name in blocks],
            accumulates=self.training.accumulates,
        ) as live:  # fmt: skip
            return live.result()

    def step(self, batch: int, length: int | None) -> Mapping[Part, PartBytes]:
        """Bytes of one step of the whole model."""
        if (batch, length) not in self.known:
            inputs = self.make_inputs(batch, length)
            found: Mapping[Part, PartBytes] | None = None
            if self.blocks is not None:
                count = len(self.model.get_submodule(self.blocks)._modules)
                few, more = (self._step(depth, inputs) for depth in DEPTHS[1:])
                found = extended(few, more, count)
            if found is None:
                self.blocks = None
                found = self._step(None, inputs)
            self.known[batch, length] = found
        return self.known[batch, length]


def largest_that_fits(total: Callable[[int], int], limit: int, bound: int) -> int:
    """The largest ``n`` in 1..bound with ``total(n) <= limit``, for a growing ``total``; 0: none.

    Lines are drawn between known points, so that a nearly affine function takes few calls.
    """
    if total(1) > limit:
        return 0
    low, high, step = 1, 2, 1
    while high <= bound and total(high) <= limit:
        rise = max(1, (total(high) - total(low)) // (high - low))
        step = max((limit - total(high)) // rise + 1, 2 * step)
        low, high = high, high + step
        if high > bound > low and total(bound) <= limit:
            return bound
    # the least size known to exceed the limit or the bound
    high = min(high, bound if bound > low else bound + 1)
    lines = True
    while high - low > 1:
        guess = (low + high) // 2
        if lines:
            rise = max(1, (total(high) - total(low)) // (high - low))
            guess = min(max(low + (limit - total(low)) // rise, low + 1), high - 1)
        lines = not lines
        if total(guess) <= limit:
            low = guess
        else:
            high = guess
    return low


class _Totals:
    """All bytes of one GPU, from those of a step."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        if training.gpus > 1 and training.quantised:
            raise ConfigError("4-bit weights are not counted on several GPUs: use lora, or one GPU")
        states = model_state_bytes(model, training.optimizer, quantised=training.quantised)
        self.training = training
        self.states = states_of_one(states, training.gpus)
        self.gathered = gathered(model, repeated_blocks(model))
        self.temporaries = temporaries_of(model, training.optimizer, training.gpus, elsewhere=True)

    def moments(self, parts: Mapping[Part, PartBytes]) -> dict[str, int]:
        """All bytes that are held at one time, at most, in each moment."""
        gpus, held = self.training.gpus, self.states.resident - self.states.dequantised
        held += self.states.gradients if self.training.accumulates else 0  # of earlier batches
        sizes = {part: size.peak for part, size in parts.items()}
        if gpus > 1:  # gradients sharded, and what is gathered added
            sizes = {
                part: size.activations + -(-size.gradients // gpus) + self.gathered.most(*part)
                for part, size in parts.items()
            }
        moments = most_of_moments(sizes, self.temporaries)
        # QLoRA multiplies by one weight after the other, each in the compute dtype for a while
        more = dict.fromkeys((FORWARD, BACKWARD), self.states.dequantised)
        return {moment: held + size + more.get(moment, 0) for moment, size in moments.items()}


def largest_size(model: nn.Module, solve: str, length: int | None) -> int:
    """The largest ``batch`` or ``length`` that is looked for: no length is above the model's positions.

    Raises:
        ConfigError: another size, or the length of a model that reads no tokens.
    """
    if solve not in _LARGEST:
        raise ConfigError(f"solve {solve!r} is none of {', '.join(_LARGEST)}")
    if solve == "length" and length is None:
        raise ConfigError(
            "the length can be solved for where a model reads tokens, and this reads none"
        )
    positions = most_positions(model) if solve == "length" else None
    return positions or _LARGEST[solve]


def predict_memory(
    model: nn.Module,
    config: PatchConfig,
    make_inputs: MakeInputs,
    *,
    batch_size: int,
    length: int | None = None,
    training: Training = USUAL_TRAINING,
    limit: int | None = None,
    solve: str = "batch",
    fragments: float = 0.0,
    plans: Plans | None = None,
) -> MemoryReport:
    """Predict the peak of a training step from fake tensors, before and after a patch.

    Args:
        model: unpatched, also on the meta device; ``requires_grad`` says which parameters train.
        config: the patch.
        make_inputs: makes inputs for a batch and a length.
        limit: bytes; solve for the largest ``batch`` (at this length) or ``length`` (at this batch).
        fragments: the share of the bytes beside the model states that a size that fits leaves free.
        plans: of this model, config and size, where they were made before.

    Raises:
        ConfigError: an unknown optimizer, checkpointing of a model that has none, 4-bit weights on several
            GPUs, or ``solve="length"`` for a model that reads no tokens.
        TraceError: the model cannot be run on fake tensors.
    """
    most = largest_size(model, solve, length)
    totals = _Totals(model, training)
    plans = plans or make_plans(model, config, make_inputs(batch_size, length))
    bound = most_positions(model) if solve == "length" else None
    report, states = plans.report, totals.states
    sides: list[tuple[Footprint, int | None, int | None]] = []
    for patched, saved, copies in (
        (False, report.saved_before, report.weight_copies_before),
        (True, report.saved_after, report.weight_copies_after),
    ):
        predictor = _Predictor(model, plans, make_inputs, patched=patched, training=training)

        def total(size: int, predictor: _Predictor = predictor) -> int:
            sizes = (size, length) if solve == "batch" else (batch_size, size)
            return max(totals.moments(predictor.step(*sizes)).values())

        largest = least = None
        if limit is not None:
            room = states.resident + int((limit - states.resident) * (1 - fragments))
            largest, least = largest_that_fits(total, room, most), total(1)
        moments = totals.moments(predictor.step(batch_size, length))
        held = (states.parameters, states.gradients, states.optimizer)
        workspace = states.workspace + states.rounding
        sides.append((Footprint(*held, saved, copies, workspace, moments), largest, least))
    (before, most_before, least_before), (after, most_after, least_after) = sides
    return MemoryReport(
        before, after, training, batch_size, length, limit, solve, most_before, most_after, bound,
        least_before, least_after,
    )  # fmt: skip


def most_positions(model: Any) -> int | None:
    """The largest length that the config has positions for; None where it names none."""
    config = text_config(getattr(base_model(model), "config", None))
    positions = getattr(config, "max_position_embeddings", None)
    return int(positions) if isinstance(positions, int) and positions > 0 else None
