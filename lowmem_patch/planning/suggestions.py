"""Which changes make a training step smaller: activation checkpointing of all blocks, smaller inputs, another
optimizer, 4-bit weights, several GPUs. Each has its predicted bytes and its predicted time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import TraceError
from lowmem_patch.memory.model_states import ModelStates, Training, model_state_bytes
from lowmem_patch.memory.sharding import gathered
from lowmem_patch.memory.steps import UnevenError
from lowmem_patch.memory.timeline import FewRuns, few_of, only
from lowmem_patch.planning.apply import apply_plan
from lowmem_patch.planning.budget import Budget
from lowmem_patch.planning.choices import input_sizes, more_seconds
from lowmem_patch.planning.costs import Device, RunSeconds
from lowmem_patch.planning.fit import Fitting
from lowmem_patch.planning.planner import facts_and_plan
from lowmem_patch.strategies.checkpointing import ALONE
from lowmem_patch.tracing.inputs import ExampleInputs

_GPUS = (2, 4, 8, 16, 32, 64)
_RANK = 8  # PEFT's default: of the adapters that stand for full training
_ADAPTER_WIDTH = 4  # bytes of an adapter's weight
_PACKED = 0.5  # bytes of a weight in 4 bits
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A step with one change, and what it takes: a row of the tables of ``inspect --memory``.

    Attributes:
        name: the change, as reports print it.
        total: bytes that the step takes on one GPU, with the model states and the reserve for fragmentation.
        seconds: predicted time of forward and backward of the blocks in that step.
        on_top: the change is made in addition to a step in which all blocks run again (or to the step of the
            least budget), and is the only such change. False: it says how the blocks run.
    """

    name: str
    total: int
    seconds: float
    on_top: bool = False


@dataclasses.dataclass(frozen=True)
class Base:
    """The step that the suggestions with ``on_top`` change.

    Attributes:
        model: whose weights count.
        inputs: of the step.
        states: of the model.
        training: its optimizer, whether frozen weights lie in few bits already, and over how many GPUs the
            model states are sharded already.
        budget: its size says what fits, and its reserve is added to each step.
        peak: bytes of the step beside what is held for the whole of training.
        runs: predicted times of the blocks' runs.
        more: predicted seconds that the levels of the blocks add.
        device: the one for which these times are predicted.
    """

    model: nn.Module
    inputs: ExampleInputs
    states: ModelStates
    training: Training
    budget: Budget
    peak: int
    runs: Sequence[RunSeconds]
    more: float
    device: Device

    @property
    def gradients(self) -> int:
        """Bytes of those that the peak may hold; gradients of earlier batches are there all the time."""
        return 0 if self.training.accumulates else self.states.gradients

    @property
    def resident(self) -> int:
        """Bytes that are held for the whole of training."""
        return self.states.resident + self.states.gradients - self.gradients

    @property
    def seconds(self) -> float:
        return sum(run.forward + run.backward for run in self.runs) + self.more

    def total(self, peak: int, states: int | None = None) -> int:
        """Bytes of a step with this peak beside ``states``, by default those of the model."""
        states = self.resident if states is None else states
        return states + peak + self.budget.reserve_above(peak)


def base_of(steps: Fitting, model: nn.Module, budget: Budget, peak: int, more: float) -> Base:
    """The base of a step of ``model``'s.

    Args:
        peak, more: of the step, as of `Base`.
    """
    quantised = steps.states.dequantised > 0 or bool(steps.shadow.beside)
    return Base(
        model, steps.shadow.inputs, steps.states, dataclasses.replace(steps.training, quantised=quantised),
        budget, peak, steps.seconds, more, steps.device,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Smaller:
    """Inputs cut in one dimension, from ``size`` to ``to``: rows (0) or tokens of each row (1)."""

    dim: int
    size: int
    to: int

    @property
    def name(self) -> str:
        changed = f"{self.to} tokens a row" if self.dim else f"a batch of {self.to}"
        return f"{changed}, not {self.size}"

    def suggestion(self, base: Base, peak_of: Callable[[ExampleInputs], int]) -> Suggestion | None:
        """The base with such inputs; None of a model that does not take them."""
        try:
            peak = peak_of(_cut(base.inputs, self.dim, self.size, self.to))
        except TraceError:
            return None
        part = self.to / self.size
        shares = (1.0, part) if self.dim else (part, 1.0)
        seconds = _part_of(base.runs, *shares) * base.seconds
        return Suggestion(self.name, base.total(max(peak, base.gradients)), seconds, on_top=True)

    def larger(self, base: Base, suggestion: Suggestion) -> _Smaller | None:
        """Inputs that are cut less, and fit if bytes grow as on a line or faster; None where there is no
        room, or the whole ones fit."""
        whole, budget = base.total(base.peak), base.budget.bytes
        if not suggestion.total <= budget < whole:
            return None
        room = (budget - suggestion.total) / (whole - suggestion.total)
        to = self.to + int(room * (self.size - self.to))
        return dataclasses.replace(self, to=to) if to > self.to else None


def smaller_suggestions(
    base: Base, peak_of: Callable[[ExampleInputs], int]
) -> Iterator[Suggestion]:
    """The base with one change each: smaller inputs, another optimizer, 4-bit weights, or several GPUs (where
    any number of them suffices). A base on several GPUs is changed by smaller inputs and by more GPUs alone.

    Args:
        peak_of: bytes of a step with other inputs, beside what is held for the whole of training.
    """
    for smaller in _smaller(base.inputs):
        if (suggestion := smaller.suggestion(base, peak_of)) is None:
            continue
        larger = smaller.larger(base, suggestion)
        found = None if larger is None else larger.suggestion(base, peak_of)
        yield suggestion if found is None or found.total > base.budget.bytes else found
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
        yield Suggestion(name, total, base.seconds, on_top=True)
    if not base.training.quantised and (sharded := _sharded(base)) is not None:
        yield sharded


def _sharded(base: Base) -> Suggestion | None:
    """The least number of GPUs that fits; None where more of them would not help.

    All shards of gradients count, and what is gathered in the backward, or before the first block.
    """
    whole = gathered(base.model)
    activations = base.peak - base.gradients
    peak = max(activations + whole.backward, whole.first)

    def total(gpus: int) -> int:
        one = dataclasses.replace(base.states, gpus=gpus)
        return base.total(peak, one.resident + one.gradients)

    return _on_fewest(base, total)


def _more_gpus(base: Base) -> Suggestion | None:
    """The least number of GPUs above the base's that fits; shards of gradients count as they are now."""
    beside = base.states.workspace + base.states.rounding
    shared = (base.resident - beside) * base.training.gpus
    return _on_fewest(base, lambda gpus: base.total(base.peak, -(-shared // gpus) + beside))


def _on_fewest(base: Base, total: Callable[[int], int]) -> Suggestion | None:
    numbers = (gpus for gpus in _GPUS if gpus > base.training.gpus)
    found = next((gpus for gpus in numbers if total(gpus) <= base.budget.bytes), None)
    if found is None:
        return None
    return Suggestion(
        f"FSDP over {found} GPUs, bytes of each", total(found), base.seconds, on_top=True
    )


def _part_of(runs: Sequence[RunSeconds], rows: float, tokens: float) -> float:
    """What is left of the blocks' time with this part of the rows and of the length."""
    forward = sum(run.forward for run in runs)
    attention = sum(run.attention for run in runs) / forward if forward else 0.0
    return rows * tokens * (1 - attention + attention * tokens)


def _smaller(inputs: ExampleInputs) -> Iterator[_Smaller]:
    """Half the length, and one row."""
    tensors = [tensor for tensor in inputs.tensors if tensor.dim() > 1]
    if not tensors:
        return
    rows = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    tokens = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    length = tokens[0].shape[1] if tokens else 0
    if length >= 4:
        yield _Smaller(1, length, length // 2)
    if rows > 1:
        yield _Smaller(0, rows, 1)


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


def _qlora(base: Base) -> Suggestion:
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
    held += 0 if full else base.states.gradients - base.gradients
    peak = base.peak - (base.gradients if full else 0)
    moved = sum(m.weight.numel() * (_PACKED + m.weight.element_size()) for m in linears)
    passes = 3 if base.more else 2
    seconds = base.seconds + passes * moved / base.device.traffic
    adapted = f", adapters of rank {_RANK} train" if full else ""
    return Suggestion(
        f"QLoRA: weights in 4 bits{adapted}", base.total(peak, held), seconds, on_top=True
    )


# of a whole model


_NAMES = {
    "patched": "patched, and no block runs again",
    "attention": "all blocks run again, their attention is saved",
    "checkpointed": "all blocks run again",
    "host": "all blocks run again, their inputs in host memory",
}


def find_suggestions(
    model: nn.Module, config: PatchConfig, inputs: ExampleInputs, training: Training, budget: Budget
) -> tuple[Suggestion, ...]:
    """One suggestion for each level that all blocks may have, and changes in addition to the last of these
    levels.

    Args:
        model: unpatched, also on the meta device.
        training: how; its own checkpointing is not looked at. Over several GPUs, each has the budget.
        budget: without several GPUs, the number of them is looked for that fits in it.

    Raises:
        TraceError: the model cannot be run on the inputs.
    """
    few = few_of(model)
    if few is not None:
        with contextlib.suppress(TraceError, UnevenError):
            return tuple(_suggestions(model, config, inputs, training, budget, few))
    return tuple(_suggestions(model, config, inputs, training, budget, None))


def _suggestions(
    model: nn.Module,
    config: PatchConfig,
    inputs: ExampleInputs,
    training: Training,
    budget: Budget,
    few: FewRuns | None,
) -> Iterator[Suggestion]:
    """The suggestions of a model; where ``few`` is given, few of its equal blocks stand for all of them."""
    with only(few, model):
        facts, plan, shadow = facts_and_plan(model, config, inputs, [])
    if shadow.mode is not None:
        apply_plan(shadow.model, plan, arithmetic=False)
    steps = Fitting(model, shadow, facts, training, few, patches=plan.patches)
    levels = list(ALONE if steps.blocks.blocks else ALONE[:1])
    if not any(run.attention for run in steps.seconds):
        levels = [level for level in levels if level != "attention"]
    free = steps.of_all([steps.blocks.blocks[run.block] in steps.free for run in steps.blocks.runs])
    sizes = input_sizes(steps.profile("patched"))
    for level in levels:
        more = sum(
            more_seconds(level, one, size, steps.device)
            for one, size, changes in zip(steps.seconds, sizes, free, strict=False)
            if changes
        )
        base = base_of(steps, model, budget, steps.beside(steps.profile(level)), more)
        yield Suggestion(_NAMES[level], base.total(base.peak), base.seconds)
    yield from smaller_suggestions(
        base, lambda smaller: steps.beside(steps.profile(levels[-1], inputs=smaller))
    )
