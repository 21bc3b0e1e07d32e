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
from lowmem_patch.memory.model_states import Training, model_state_bytes
from lowmem_patch.memory.sharding import gathered
from lowmem_patch.memory.steps import UnevenError
from lowmem_patch.memory.timeline import FewRuns, few_of, only
from lowmem_patch.planning.budget import Budget
from lowmem_patch.planning.choices import input_sizes, more_seconds
from lowmem_patch.planning.costs import RunSeconds
from lowmem_patch.planning.fit import Fitting
from lowmem_patch.planning.plan import apply_plan
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
        steps: those of which it is one: its inputs, model states, training, times and device.
        model: whose weights count.
        budget: its size says what fits, and its reserve is added to each step.
        peak: bytes of the step beside what is held for the whole of training.
        more: predicted seconds that the levels of the blocks add.
    """

    steps: Fitting
    model: nn.Module
    budget: Budget
    peak: int
    more: float

    @property
    def gradients(self) -> int:
        """Bytes of those that the peak may hold; gradients of earlier batches are there all the time."""
        return self.steps.states.gradients - self.steps.earlier

    @property
    def is_quantised(self) -> bool:
        """Whether frozen weights lie in few bits already."""
        steps = self.steps
        return steps.states.dequantised > 0 or bool(steps.shadow.beside)

    @property
    def seconds(self) -> float:
        return sum(run.forward + run.backward for run in self.steps.seconds) + self.more

    def total(self, peak: int, states: int | None = None) -> int:
        """Bytes of a step with this peak beside ``states``, by default those of the model."""
        return self.budget.total(self.steps.resident if states is None else states, peak)


def smaller_suggestions(
    base: Base, peak_of: Callable[[ExampleInputs], int]
) -> Iterator[Suggestion]:
    """The base with one change each: smaller inputs, another optimizer, 4-bit weights, or several GPUs (where
    any number of them suffices). A base on several GPUs is changed by smaller inputs and by more GPUs alone.

    Args:
        peak_of: bytes of a step with other inputs, beside what is held for the whole of training.
    """
    steps = base.steps
    for dim, size, to in _smaller(steps.shadow.inputs):
        suggestion = _of_smaller(base, peak_of, dim, size, to)
        if suggestion is None:
            continue
        whole, budget = base.total(base.peak), base.budget.bytes
        if suggestion.total <= budget < whole:
            # inputs that are cut less, and fit if bytes grow as on a line or faster
            room = (budget - suggestion.total) / (whole - suggestion.total)
            larger = to + int(room * (size - to))
            found = _of_smaller(base, peak_of, dim, size, larger) if larger > to else None
            if found is not None and found.total <= budget:
                suggestion = found
        yield suggestion
    if steps.training.gpus > 1:
        if (more := _more_gpus(base)) is not None:
            yield more
        return
    if not base.is_quantised and _is_of_linears(base.model):
        yield _qlora(base)
    given = steps.training.optimizer
    if given != "adamw8bit":
        optimizer = model_state_bytes(base.model, "adamw8bit").optimizer
        total = base.total(base.peak, steps.resident - steps.states.optimizer + optimizer)
        name = f"adamw8bit, an 8-bit optimizer, not {given}"
        yield Suggestion(name, total, base.seconds, on_top=True)
    if not base.is_quantised and (sharded := _sharded(base)) is not None:
        yield sharded


def _of_smaller(
    base: Base, peak_of: Callable[[ExampleInputs], int], dim: int, size: int, to: int
) -> Suggestion | None:
    """The base with inputs cut in one dimension: rows (0) or tokens of each row (1); None of a model that
    does not take them."""
    steps, part = base.steps, to / size
    try:
        peak = peak_of(_cut(steps.shadow.inputs, dim, size, to))
    except TraceError:
        return None
    shares = (1.0, part) if dim else (part, 1.0)
    seconds = _part_of(steps.seconds, *shares) * base.seconds
    changed = f"{to} tokens a row" if dim else f"a batch of {to}"
    total = base.total(max(peak, base.gradients))
    return Suggestion(f"{changed}, not {size}", total, seconds, on_top=True)


def _sharded(base: Base) -> Suggestion | None:
    """The least number of GPUs that fits; None where more of them would not help.

    All shards of gradients count, and what is gathered in the backward, where gradients wait whole to be
    reduced, or before the first block.
    """
    whole = gathered(base.model)
    waiting = whole.rest_gradients + 2 * whole.block_gradients
    peak = max(base.peak - base.gradients + whole.computing + waiting, whole.first)

    def total(gpus: int) -> int:
        one = dataclasses.replace(base.steps.states, gpus=gpus, buckets=0)  # DDP's
        return base.total(peak, one.resident + one.gradients)

    return _on_fewest(base, total)


def _more_gpus(base: Base) -> Suggestion | None:
    """The least number of GPUs above the base's that fits; shards of gradients count as they are now."""
    steps = base.steps
    beside = steps.states.workspace + steps.states.rounding
    shared = (steps.resident - beside) * steps.training.gpus
    return _on_fewest(base, lambda gpus: base.total(base.peak, -(-shared // gpus) + beside))


def _on_fewest(base: Base, total: Callable[[int], int]) -> Suggestion | None:
    numbers = (gpus for gpus in _GPUS if gpus > base.steps.training.gpus)
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


def _smaller(inputs: ExampleInputs) -> Iterator[tuple[int, int, int]]:
    """Half the length, and one row: a dimension, its size and a smaller one."""
    tensors = [tensor for tensor in inputs.tensors if tensor.dim() > 1]
    if not tensors:
        return
    rows = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    tokens = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    length = tokens[0].shape[1] if tokens else 0
    if length >= 4:
        yield 1, length, length // 2
    if rows > 1:
        yield 0, rows, 1


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
    model, steps = base.model, base.steps
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    full = all(module.weight.requires_grad for module in linears)
    adapters = 0
    try:
        if full:
            model.requires_grad_(False)
            adapters = sum(_RANK * (m.in_features + m.out_features) for m in linears)
        states = model_state_bytes(model, steps.training.optimizer, quantised=True)
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    # a base of a GPU has workspaces, wherever its model is now
    beside = steps.states.workspace + (states.rounding or steps.states.rounding)
    # weights, gradients and two moments of the adapters
    held = states.counted - states.workspace + beside + 4 * _ADAPTER_WIDTH * adapters
    held += 0 if full else steps.earlier
    peak = base.peak - (base.gradients if full else 0)
    moved = sum(m.weight.numel() * (_PACKED + m.weight.element_size()) for m in linears)
    passes = 3 if base.more else 2
    seconds = base.seconds + passes * moved / steps.device.traffic
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
        base = Base(steps, model, budget, steps.beside(steps.profile(level)), more)
        yield Suggestion(_NAMES[level], base.total(base.peak), base.seconds)
    yield from smaller_suggestions(
        base, lambda smaller: steps.beside(steps.profile(levels[-1], inputs=smaller))
    )
