"""The peak of a training step before and after a patch, and the largest batch or length that fits.

Of many equal blocks few are run (`lowmem_patch.memory.timeline`), of other models all. Batch sizes and
lengths are never extrapolated: a size that is said to fit was run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import ConfigError
from lowmem_patch.memory.few_blocks import Plans, make_plans
from lowmem_patch.memory.model_states import USUAL_TRAINING, ModelStates, Training
from lowmem_patch.memory.step import BACKWARD, FORWARD
from lowmem_patch.memory.steps import Steps, UnevenError
from lowmem_patch.memory.timeline import only
from lowmem_patch.planning.plan import apply_plan
from lowmem_patch.planning.planner import plan_model
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.tracing.base_model import base_model, switch_checkpointing_on, text_config
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import fake_inputs, make_shadow

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
        ConfigError: an unknown optimizer, checkpointing of a model that has none, several GPUs for quantised
            weights, or ``solve="length"`` for a model that reads no tokens.
        TraceError: the model cannot be run on fake tensors.
    """
    most = largest_size(model, solve, length)
    plans = plans or make_plans(model, config, make_inputs(batch_size, length))

    def side(plans: Plans, patched: bool) -> tuple[Footprint, int | None, int | None]:
        steps = _steps(model, plans, training, patched=patched)
        moments = functools.cache(lambda *size: _moments(steps, make_inputs(*size)))

        def total(size: int) -> int:
            sizes = (size, length) if solve == "batch" else (batch_size, size)
            return max(moments(*sizes).values())

        largest = least = None
        if limit is not None:
            room = steps.resident + int((limit - steps.resident) * (1 - fragments))
            largest, least = largest_that_fits(total, room, most), total(1)
        found = _footprint(steps.states, plans.report, moments(batch_size, length), patched)
        return found, largest, least

    try:
        sides = [side(plans, patched) for patched in (False, True)]
    except UnevenError:
        whole = Plans(plans.report, plan_model(model, config, plans.planned.inputs), None)
        sides = [side(whole, patched) for patched in (False, True)]
    (before, most_before, least_before), (after, most_after, least_after) = sides
    return MemoryReport(
        before, after, training, batch_size, length, limit, solve, most_before, most_after,
        most_positions(model) if solve == "length" else None, least_before, least_after,
    )  # fmt: skip


def _steps(model: nn.Module, plans: Plans, training: Training, *, patched: bool) -> Steps:
    """Steps of the model, as it is or patched, or of few of its blocks.

    Raises:
        UnevenError: few do not tell of all.
    """
    planned, few = plans.planned, plans.few
    shadow = planned.shadow
    # checkpointing stays switched on in a copy: another prediction may be without
    if not patched or training.checkpointing or shadow.mode is None:
        with only(few, model):
            shadow = make_shadow(model, planned.inputs)
        if patched:
            apply_plan(shadow.model, planned.plan, arithmetic=False)
        if training.checkpointing and not switch_checkpointing_on(shadow.model):
            name = type(base_model(model)).__name__
            raise ConfigError(f"{name} has no activation checkpointing of its own to switch on")
    return Steps(model, shadow, planned.facts, training, few)


def _moments(steps: Steps, inputs: ExampleInputs) -> dict[str, int]:
    """All bytes of one GPU that are held at one time, at most, in each moment of a step."""
    states, mode = steps.states, steps.shadow.mode
    assert mode is not None  # or it would have been no shadow
    timeline = steps.profile("patched", inputs=fake_inputs(inputs, mode, torch.device("cpu")))
    # QLoRA multiplies by one weight after the other, each in the compute dtype for a while
    more = dict.fromkeys((FORWARD, BACKWARD), states.dequantised)
    held = steps.resident - states.dequantised
    moments = timeline.moments(steps.temporaries)
    return {moment: held + size + more.get(moment, 0) for moment, size in moments.items()}


def _footprint(
    states: ModelStates, report: PatchReport, moments: Mapping[str, int], patched: bool
) -> Footprint:
    saved, copies = report.saved_before, report.weight_copies_before
    if patched:
        saved, copies = report.saved_after, report.weight_copies_after
    held = (states.parameters, states.gradients, states.optimizer)
    return Footprint(*held, saved, copies, states.workspace + states.rounding, moments)


def most_positions(model: Any) -> int | None:
    """The largest length that the config has positions for; None where it names none."""
    config = text_config(getattr(base_model(model), "config", None))
    positions = getattr(config, "max_position_embeddings", None)
    return int(positions) if isinstance(positions, int) and positions > 0 else None
