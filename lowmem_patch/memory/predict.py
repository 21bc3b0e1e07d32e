"""The peak of a training step before and after a patch, and the largest batch or length that fits.

A model of many equal blocks is measured with two, three and four of them: bytes grow by the same
amount with each block, and the third block proves it. Other models are measured whole. Batch sizes
and lengths are never extrapolated: a size that is said to fit was run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import ConfigError
from lowmem_patch.memory.base_model import base_model
from lowmem_patch.memory.model_states import ModelStates, model_state_bytes
from lowmem_patch.memory.step import StepBytes, step_bytes
from lowmem_patch.planning.apply import apply_plan
from lowmem_patch.planning.plan import make_plan
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow, make_shadow
from lowmem_patch.tracing.trace import trace_forward

__all__ = ["Footprint", "MemoryReport", "largest_that_fits", "most_positions", "predict_memory"]

# fewer equal blocks than this are all measured
_MANY_BLOCKS = 6
_DEPTHS = (2, 3, 4)
_LARGEST = {"batch": 1 << 20, "length": 1 << 24}

MakeInputs = Callable[[int, int | None], ExampleInputs]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a training step.

    Attributes:
        parameters, gradients, optimizer: the model states, held for the whole of training.
        saved: activations that autograd holds after the forward.
        weight_copies: low-precision copies of weights that autograd holds.
        transient: all other bytes at the peak: logits and loss, the block that is in its backward,
            copies of weights in autocast's cache, and one dequantised weight with ``qlora``.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    weight_copies: int
    transient: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def to_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Predicted memory for one batch and length, and the largest size that fits.

    Attributes:
        before, after: the unpatched and the patched model.
        optimizer: its name.
        batch_size, length: of the prediction; length is None where the model reads no tokens.
        limit: bytes that may be used, if one was given.
        solved: ``batch`` or ``length``, the size that was solved for.
        largest_before, largest_after: the largest such size within the limit; 0: not even 1 fits.
        bound: a largest size that the model itself allows (positions), if it has one.
    """

    before: Footprint
    after: Footprint
    optimizer: str
    batch_size: int
    length: int | None
    limit: int | None = None
    solved: str = "batch"
    largest_before: int | None = None
    largest_after: int | None = None
    bound: int | None = None

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["before"], data["after"] = self.before.to_dict(), self.after.to_dict()
        return data


def _signature(module: nn.Module) -> object:
    parameters = (
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    )
    return type(module), tuple(parameters)


def _repeated_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The list of many equal blocks that holds most parameters."""
    found: nn.ModuleList | nn.Sequential | None = None
    most = 0
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < _MANY_BLOCKS:
            continue
        if len({_signature(child) for child in module}) == 1:
            size = sum(p.numel() for p in module.parameters())
            if size > most:
                found, most = module, size
    return found


@contextlib.contextmanager
def _shortened(blocks: nn.Module | None, depth: int | None) -> Iterator[None]:
    """Only the first ``depth`` blocks while the context is open; all when either is None."""
    if blocks is None or depth is None:
        yield
        return
    every = blocks._modules
    blocks._modules = dict(list(every.items())[:depth])
    try:
        yield
    finally:
        blocks._modules = every


class _Predictor:
    """Steps of one model, unpatched (``config`` None) or patched, at any size."""

    def __init__(
        self, model: nn.Module, config: PatchConfig | None, make_inputs: MakeInputs
    ) -> None:
        self.model = model
        self.config = config
        self.make_inputs = make_inputs
        self.blocks = _repeated_blocks(model)
        self.count = 0 if self.blocks is None else len(self.blocks)
        self.shadows: dict[int | None, Shadow] = {}
        self.known: dict[tuple[int, int | None], StepBytes] = {}

    def _shadow(self, depth: int | None, inputs: ExampleInputs) -> Shadow:
        if depth not in self.shadows:
            with _shortened(self.blocks, depth):
                shadow = make_shadow(self.model, inputs)
                if self.config is not None:
                    trace = trace_forward(shadow)
                    plan = make_plan(Facts(self.model, shadow.model, trace, {}), self.config)
                    apply_plan(shadow.model, plan, arithmetic=False)
            self.shadows[depth] = shadow
        return self.shadows[depth]

    def _step(self, depth: int | None, inputs: ExampleInputs) -> StepBytes:
        shadow = self._shadow(depth, inputs)
        assert shadow.mode is not None
        with shadow.mode:
            fakes = inputs.map(lambda tensor: tensor.new_empty(tensor.shape, device="cpu"))
        return step_bytes(dataclasses.replace(shadow, inputs=fakes))

    def step(self, batch: int, length: int | None) -> StepBytes:
        """Bytes of one step of the whole model."""
        if (batch, length) not in self.known:
            inputs = self.make_inputs(batch, length)
            found = self._from_few(inputs) if self.blocks is not None else None
            if found is None:
                self.blocks = None
                found = self._step(None, inputs)
            self.known[batch, length] = found
        return self.known[batch, length]

    def _from_few(self, inputs: ExampleInputs) -> StepBytes | None:
        """Extended from a few blocks, or None where the blocks save different amounts."""
        depths = _DEPTHS if not self.known else _DEPTHS[:2]
        steps = [dataclasses.astuple(self._step(depth, inputs)) for depth in depths]
        slope = [later - earlier for earlier, later in zip(*steps[:2], strict=True)]
        if len(steps) > 2:  # the first time: a third block must add as much as the second
            added = [later - earlier for earlier, later in zip(*steps[1:], strict=True)]
            if added[:2] != slope[:2] or abs(added[2] - slope[2]) > 0.01 * max(slope[2], 1):
                return None
        more = self.count - depths[0]
        return StepBytes(
            *(first + more * rise for first, rise in zip(steps[0], slope, strict=True))
        )


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


def _footprint(states: ModelStates, step: StepBytes) -> Footprint:
    transient = max(0, step.peak - step.saved - step.weight_copies) + states.dequantised
    return Footprint(
        states.parameters, states.gradients, states.optimizer, step.saved, step.weight_copies, transient
    )  # fmt: skip


def predict_memory(
    model: nn.Module,
    config: PatchConfig,
    make_inputs: MakeInputs,
    *,
    batch_size: int,
    length: int | None = None,
    optimizer: str = "adamw",
    quantised: bool = False,
    limit: int | None = None,
    solve: str = "batch",
) -> MemoryReport:
    """Predict the peak of a training step from fake tensors, before and after a patch.

    Args:
        model: unpatched, also on the meta device; ``requires_grad`` says which parameters train.
        config: the patch.
        make_inputs: makes inputs for a batch and a length.
        optimizer, quantised: as in :func:`model_state_bytes`.
        limit: bytes; solve for the largest ``batch`` (at this length) or ``length`` (at this batch).

    Raises:
        ConfigError: an unknown optimizer, or ``solve="length"`` for a model that reads no tokens.
        TraceError: the model cannot be run on fake tensors.
    """
    states = model_state_bytes(model, optimizer, quantised=quantised)
    predictors = [_Predictor(model, which, make_inputs) for which in (None, config)]
    if solve not in _LARGEST:
        raise ConfigError(f"solve {solve!r} is none of {', '.join(_LARGEST)}")
    bound = most_positions(model) if solve == "length" else None
    if solve == "length" and length is None:
        raise ConfigError(
            "the length can be solved for where a model reads tokens, and this reads none"
        )

    def largest(predictor: _Predictor) -> int | None:
        def total(size: int) -> int:
            sizes = (size, length) if solve == "batch" else (batch_size, size)
            return _footprint(states, predictor.step(*sizes)).total

        return None if limit is None else largest_that_fits(total, limit, bound or _LARGEST[solve])

    largest_before, largest_after = map(largest, predictors)
    before, after = (_footprint(states, p.step(batch_size, length)) for p in predictors)
    return MemoryReport(
        before,
        after,
        optimizer,
        batch_size,
        length,
        limit,
        solve,
        largest_before,
        largest_after,
        bound,
    )


def most_positions(model: Any) -> int | None:
    """The largest length that the config has positions for; None where it names none."""
    config: Any = getattr(base_model(model), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return int(positions) if isinstance(positions, int) and positions > 0 else None
