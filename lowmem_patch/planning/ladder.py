"""What makes a training step smaller, one thing after the other, with the bytes and the time of each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import TraceError
from lowmem_patch.memory.blocks import repeated_blocks, shortened
from lowmem_patch.memory.model_states import ModelStates, Training, model_state_bytes
from lowmem_patch.memory.optimizers import temporaries_of
from lowmem_patch.memory.sharding import gathered, states_of_one
from lowmem_patch.memory.step import BACKWARD
from lowmem_patch.planning.apply import apply_plan
from lowmem_patch.planning.budget import Budget
from lowmem_patch.planning.costs import Device, RunSeconds, device_of, run_seconds
from lowmem_patch.planning.fit_sums import more_seconds
from lowmem_patch.planning.planner import facts_and_plan
from lowmem_patch.planning.sharded_timeline import sharding_of
from lowmem_patch.planning.timeline import FewRuns, Timeline, few_of, few_runs, run_levels
from lowmem_patch.strategies.checkpointing import ALONE, find_blocks
from lowmem_patch.tracing.inputs import ExampleInputs

_GPUS = (2, 4, 8, 16, 32, 64)
_RANK = 16  # of the adapters that stand for full training
_ADAPTER_WIDTH = 4  # bytes of an adapter's weight
_PACKED = 0.5  # bytes of a weight in 4 bits
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclasses.dataclass(frozen=True)
class Rung:
    """One thing that would help.

    Attributes:
        name: what it is.
        total: bytes that a step takes then on one GPU, model states and the reserve for fragmentation
            included.
        seconds: predicted, of forward and backward of the blocks in that step.
        on_top: of the last way in which all blocks run again, or of the least budget: a change more, alone.
    """

    name: str
    total: int
    seconds: float
    on_top: bool = False


@dataclasses.dataclass(frozen=True)
class Base:
    """A step from which further rungs are counted.

    Attributes:
        model: whose weights count.
        inputs: of the step.
        sites: paths of the blocks.
        states: of the model.
        training: its optimizer, whether frozen weights lie in few bits already, and over how many GPUs the
            model states are sharded already.
        budget: of which the reserve and the size count.
        peak: bytes of the step beside parameters and optimizer state.
        runs: predicted times of the blocks' runs.
        more: predicted seconds that their levels cost.
        device: that has these times.
    """

    model: nn.Module
    inputs: ExampleInputs
    sites: Sequence[str]
    states: ModelStates
    training: Training
    budget: Budget
    peak: int
    runs: Sequence[RunSeconds]
    more: float
    device: Device

    @property
    def resident(self) -> int:
        return self.states.resident

    @property
    def seconds(self) -> float:
        return sum(run.forward + run.backward for run in self.runs) + self.more

    def total(self, peak: int, states: int | None = None) -> int:
        """Bytes of a step with this peak beside ``states``, by default those of the model."""
        states = self.resident if states is None else states
        return states + peak + self.budget.reserve_above(peak)


def smaller_rungs(base: Base, peak_of: Callable[[ExampleInputs], int]) -> Iterator[Rung]:
    """Smaller inputs, another optimizer, 4-bit weights and several GPUs (where any number of them suffices):
    each alone on top of the base; of a base on several GPUs smaller inputs, and more GPUs.

    Args:
        peak_of: bytes of a step with other inputs, beside parameters and optimizer state.
    """
    for name, smaller, rows, tokens in _smaller(base.inputs):
        try:
            peak = peak_of(smaller)
        except TraceError:  # not every model takes another size
            continue
        seconds = _part_of(base.runs, rows, tokens) * base.seconds
        yield Rung(name, base.total(max(peak, base.states.gradients)), seconds, on_top=True)
    if base.training.gpus > 1:
        if (more := _more_gpus(base)) is not None:
            yield more
        return
    if not base.training.quantised and _is_of_linears(base.model):
        yield _qlora(base)
    if base.training.optimizer != "adamw8bit":
        optimizer = model_state_bytes(base.model, "adamw8bit").optimizer
        total = base.total(base.peak, base.resident - base.states.optimizer + optimizer)
        name = f"adamw8bit, an 8-bit optimizer, not {base.training.optimizer}"
        yield Rung(name, total, base.seconds, on_top=True)
    if not base.training.quantised and (sharded := _sharded(base)) is not None:
        yield sharded


def _sharded(base: Base) -> Rung | None:
    """The least number of GPUs that fits; None where more of them would not help.

    All shards of gradients count, and what is gathered in the backward, or before the first block.
    """
    whole = gathered(base.model, repeated_blocks(base.model))
    activations = base.peak - base.states.gradients
    peak = max(activations + whole.most(BACKWARD, 0), whole.first)

    def total(gpus: int) -> int:
        one = states_of_one(base.states, gpus)
        return base.total(peak, one.resident + one.gradients)

    return _on_fewest(base, total)


def _more_gpus(base: Base) -> Rung | None:
    """The least number of GPUs above the base's that fits; shards of gradients count as they are now."""
    beside = base.states.workspace + base.states.rounding
    shared = (base.resident - beside) * base.training.gpus
    return _on_fewest(base, lambda gpus: base.total(base.peak, -(-shared // gpus) + beside))


def _on_fewest(base: Base, total: Callable[[int], int]) -> Rung | None:
    numbers = (gpus for gpus in _GPUS if gpus > base.training.gpus)
    found = next((gpus for gpus in numbers if total(gpus) <= base.budget.bytes), None)
    if found is None:
        return None
    return Rung(f"FSDP over {found} GPUs, bytes of each", total(found), base.seconds, on_top=True)


def _part_of(runs: Sequence[RunSeconds], rows: float, tokens: float) -> float:
    """What is left of the blocks' time with this part of the rows and of the length."""
    forward = sum(run.forward for run in runs)
    attention = sum(run.attention for run in runs) / forward if forward else 0.0
    return rows * tokens * (1 - attention + attention * tokens)


def _smaller(inputs: ExampleInputs) -> Iterator[tuple[str, ExampleInputs, float, float]]:
    """The inputs with one row, and with half the length; and what parts these are."""
    tensors = [tensor for tensor in inputs.tensors if tensor.dim() > 1]
    if not tensors:
        return
    rows = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    tokens = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    length = tokens[0].shape[1] if tokens else 0
    if length >= 4:
        yield (
            f"{length // 2} tokens a row, not {length}",
            _cut(inputs, 1, length, length // 2),
            1.0,
            0.5,
        )
    if rows > 1:
        yield f"a batch of 1, not {rows}", _cut(inputs, 0, rows, 1), 1 / rows, 1.0


def _cut(inputs: ExampleInputs, dim: int, size: int, smaller: int) -> ExampleInputs:
    def cut(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        for place in range(dim, len(shape) if dim else min(1, len(shape))):
            if shape[place] == size:
                shape[place] = smaller
        return tensor.new_empty(shape)

    return inputs.map(cut)


def _is_of_linears(model: nn.Module) -> bool:
    """Whether more weights are of Linears, which QLoRA packs and gives adapters, than of convolutions."""
    linears, convolutions = (
        sum(module.weight.numel() for module in model.modules() if isinstance(module, kind))
        for kind in (nn.Linear, _CONVOLUTIONS)
    )
    return linears > convolutions


def _qlora(base: Base) -> Rung:
    """Weights of frozen Linears in 4 bits; where all weights train, adapters train in their place.

    Each pass over a block writes each weight in the compute dtype first.
    """
    model = base.model
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    full = all(module.weight.requires_grad for module in linears)
    adapters = 0
    try:
        if full:
            model.requires_grad_(False)
            adapters = sum(_RANK * (m.in_features + m.out_features) for m in linears)
        states = model_state_bytes(model, base.training.optimizer, quantised=True)
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    # a base of a GPU has workspaces, wherever its model is now
    beside = base.states.workspace + (states.rounding or base.states.rounding)
    # weights, gradients and two moments of the adapters
    held = states.counted - states.workspace + beside + 4 * _ADAPTER_WIDTH * adapters
    peak = base.peak - (base.states.gradients if full else 0)
    moved = sum(m.weight.numel() * (_PACKED + m.weight.element_size()) for m in linears)
    passes = 3 if base.more else 2
    seconds = base.seconds + passes * moved / base.device.traffic
    adapted = f", adapters of rank {_RANK} train" if full else ""
    return Rung(f"QLoRA: weights in 4 bits{adapted}", base.total(peak, held), seconds, on_top=True)


# of a whole model


_NAMES = {
    "patched": "patched, and no block runs again",
    "attention": "all blocks run again, their attention is saved",
    "checkpointed": "all blocks run again",
    "host": "all blocks run again, their inputs in host memory",
}


class _Uneven(Exception):
    """Few blocks do not tell what many need."""


class _Steps:
    """Steps of the patched model, of few of its blocks where these tell all."""

    def __init__(
        self, model: nn.Module, config: PatchConfig, inputs: ExampleInputs, few: FewRuns | None
    ) -> None:
        path, depth = (few.path, few.depth) if few else (None, None)
        with shortened(model, path, depth):
            facts, plan, self.shadow = facts_and_plan(model, config, inputs, [])
        if self.shadow.mode is not None:
            apply_plan(self.shadow.model, plan, arithmetic=False)
        self.blocks = find_blocks(facts)
        self.device = device_of(model)
        self.runs = run_seconds(facts, self.blocks, self.device, plan.patches)
        self.few = few_runs(self.shadow.model, self.blocks, few)
        if self.few is not None:
            self.runs = self.few.extended_runs(self.runs)
        elif few is not None:
            raise _Uneven

    def run(self, level: str, accumulates: bool, inputs: ExampleInputs | None = None) -> Timeline:
        levels = {block.site: level for block in self.blocks.blocks if not block.refusal}
        found = run_levels(self.shadow, self.blocks, levels, inputs=inputs, accumulates=accumulates)
        extended = found if self.few is None else self.few.extended(found)
        if extended is None:
            raise _Uneven
        return extended


def find_rungs(
    model: nn.Module,
    config: PatchConfig,
    inputs: ExampleInputs,
    training: Training,
    budget: Budget,
) -> tuple[Rung, ...]:
    """The ladder of a model: each level for all blocks, and, on top of the last, what else helps.

    Args:
        model: unpatched, also on the meta device.
        training: how; its own checkpointing is not looked at. Over several GPUs, each has the budget.
        budget: without several GPUs, the number of them is looked for that fits in it.

    Raises:
        TraceError: the model cannot be run on the inputs.
    """
    few = few_of(model)
    if few is not None:
        with contextlib.suppress(TraceError, _Uneven):
            return tuple(_rungs(model, _Steps(model, config, inputs, few), training, budget))
    return tuple(_rungs(model, _Steps(model, config, inputs, None), training, budget))


def _rungs(model: nn.Module, steps: _Steps, training: Training, budget: Budget) -> Iterator[Rung]:
    states = model_state_bytes(model, training.optimizer, quantised=training.quantised)
    if training.gpus > 1:
        states = states_of_one(states, training.gpus)
    sharding = sharding_of(model, steps.blocks, training)
    if sharding is not None and steps.few is not None:
        sharding = dataclasses.replace(
            sharding, gradients=steps.few.extended_runs(sharding.gradients)
        )
    # gradients of earlier batches are there from the beginning
    earlier = states.gradients if training.accumulates else 0
    temporaries = sum(temporaries_of(model, training.optimizer, training.gpus, elsewhere=True))
    levels = list(ALONE if steps.blocks.blocks else ALONE[:1])
    if not any(run.attention for run in steps.runs):
        levels = [level for level in levels if level != "attention"]

    def peak_of(timeline: Timeline) -> int:
        timeline = timeline if sharding is None else sharding.of_one(timeline)
        return earlier + max(timeline.peak[0], timeline.end + temporaries)

    sites = [block.site for block in steps.blocks.blocks]
    base = Base(
        model,
        steps.shadow.inputs,
        sites,
        states,
        training,
        budget,
        0,
        steps.runs,
        0.0,
        steps.device,
    )
    for level in levels:
        timeline = steps.run(level, training.accumulates)
        outputs = [run.output for run in timeline.runs]
        more = sum(
            more_seconds(level, one, size, steps.device)
            for one, size in zip(steps.runs, outputs, strict=False)
        )
        base = dataclasses.replace(base, peak=peak_of(timeline), more=more)
        yield Rung(_NAMES[level], base.total(base.peak), base.seconds)
    yield from smaller_rungs(
        base, lambda smaller: peak_of(steps.run(levels[-1], training.accumulates, smaller))
    )
