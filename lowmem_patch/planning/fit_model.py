"""From a planned patch and a budget to the blocks that run again; or what would help where nothing fits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from lowmem_patch.errors import BudgetError, TraceError
from lowmem_patch.memory.model_states import model_state_bytes
from lowmem_patch.nn.gammas import would_tell_z
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.planning.budget import Budget, free_host_bytes, make_budget
from lowmem_patch.planning.costs import RunSeconds, device_of, run_seconds, scaled, timed_forward
from lowmem_patch.planning.fit import Fitting, NoFit
from lowmem_patch.planning.fit_report import size_text
from lowmem_patch.planning.planner import Planned
from lowmem_patch.strategies.checkpointing import Blocks, find_blocks
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import tensors_in

__all__ = ["fit_planned"]

_GPUS = (2, 4, 8, 16, 32, 64)
_RANK = 16  # of the adapters that stand for full training
_ADAPTER_WIDTH = 4  # bytes of an adapter's weight


def fit_planned(
    model: nn.Module,
    planned: Planned,
    fit: str | int,
    optimizer: str,
    *,
    host: int | None = None,
    timed: bool | None = None,
) -> Planned:
    """The plan with the patches of the blocks that run again, and the report with what was chosen.

    Args:
        fit, optimizer: as in ``patch_model``.
        host: bytes of host memory for inputs of blocks; default: half of what is available.
        timed: time a forward of the model; default: where it is on a GPU.

    Raises:
        ConfigError: a budget that is no size, or an unknown optimizer.
        BudgetError: nothing fits, or the model cannot run on fake tensors.
    """
    budget = make_budget(fit, model)
    states = model_state_bytes(model, optimizer)
    if planned.shadow.mode is None:
        raise BudgetError(
            f"fit={fit!r}: this {type(model).__name__} runs on data alone (its weights have no fake "
            "tensors), so its step cannot be planned: leave fit away, and use the library's own checkpointing"
        )
    blocks = find_blocks(planned.facts)
    device = device_of(model)
    seconds = run_seconds(planned.facts, blocks, device)
    timed = _is_on_gpu(model) if timed is None else timed
    if timed and blocks.runs:
        seconds = _timed(model, planned.inputs, blocks, seconds)
    _assume_looks(model, planned.shadow.model)
    host = free_host_bytes() if host is None else host
    fitting = Fitting(planned.shadow, blocks, seconds, device, states, optimizer, host)
    try:
        fitted = fitting.fit(budget, planned.report.inputs)
    except NoFit as found:
        raise BudgetError(_too_small(fitting, budget, found, planned.report.inputs)) from None
    plan = dataclasses.replace(planned.plan, patches=(*planned.plan.patches, *fitted.patches))
    report = dataclasses.replace(planned.report, fit=fitted.report)
    return planned._replace(plan=plan, report=report)


def _assume_looks(model: nn.Module, shadow: nn.Module) -> None:
    """Tell the norms of a patched shadow, which has no data, what their gammas and betas are like."""
    modules = dict(model.named_modules())
    for name, norm in shadow.named_modules():
        if isinstance(norm, MSNorm) and not norm.folded and name in modules:
            own = modules[name]._parameters
            found = would_tell_z(own.get("weight"), own.get("bias"), norm.settings)
            norm.looks.assumed = found


def _is_on_gpu(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def _timed(
    model: nn.Module, inputs: ExampleInputs, blocks: Blocks, seconds: tuple[RunSeconds, ...]
) -> tuple[RunSeconds, ...]:
    device = next(model.parameters()).device
    there = inputs.map(lambda tensor: tensor.to(device))
    return scaled(seconds, timed_forward(model, there, [block.site for block in blocks.blocks]))


# what would help


@dataclasses.dataclass(frozen=True)
class _Rung:
    """One thing that would help, and the bytes that a step takes then."""

    name: str
    total: int


def _too_small(fitting: Fitting, budget: Budget, found: NoFit, inputs: str) -> str:
    rungs = sorted(_rungs(fitting, budget, found), key=lambda rung: -rung.total)
    states, weights = fitting.resident, fitting.states.parameters
    lines = [
        f"fit {budget.asked}: no training step of this model fits. The least budget is "
        f"{size_text(found.least)} ({found.least} bytes) for {inputs} and {fitting.optimizer}: parameters "
        f"{size_text(weights)}, optimizer state {size_text(states - weights)}, gradients and activations "
        f"{size_text(found.peak)}"
    ]
    if budget.bytes <= weights:
        lines.append("the parameters alone are larger than the budget")
    lines += [
        f"  {rung.name}: {size_text(rung.total)}" + (", fits" if rung.total <= budget.bytes else "")
        for rung in rungs
        if rung.total < found.least
    ]
    return "\n".join(lines)


def _rungs(fitting: Fitting, budget: Budget, found: NoFit) -> Iterator[_Rung]:
    """With every block at the level of the least budget."""
    model, optimizer = fitting.shadow.model, fitting.optimizer
    for name, smaller in _smaller(fitting.shadow.inputs):
        try:
            peak = fitting.run(found.levels, inputs=smaller).peak[0]
        except TraceError:  # not every model takes another size
            continue
        total = fitting.resident + max(peak, fitting.states.gradients)
        yield _Rung(name, total + budget.reserve_above(peak))
    above = found.least - fitting.resident
    if optimizer != "adamw8bit":
        states = model_state_bytes(model, "adamw8bit")
        yield _Rung("an 8-bit optimizer (adamw8bit)", states.parameters + states.optimizer + above)
    for gpus in _GPUS:
        shared = fitting.resident + fitting.states.gradients
        part = -(-shared // gpus) + _largest_block(fitting) + above - fitting.states.gradients
        yield _Rung(f"FSDP over {gpus} GPUs, on each", part)
        if part <= budget.bytes:
            break
    yield _Rung(f"QLoRA, rank {_RANK}, {optimizer}", _qlora(fitting, above))


def _smaller(inputs: ExampleInputs) -> Iterator[tuple[str, ExampleInputs]]:
    """The inputs with one row, and with half the length and a quarter of it."""
    tensors = [tensor for tensor in tensors_in((inputs.args, inputs.kwargs)) if tensor.dim() > 1]
    if not tensors:
        return
    rows = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    if rows > 1:
        yield f"a batch of 1 in the place of {rows}", _cut(inputs, 0, rows, 1)
    tokens = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    length = tokens[0].shape[1] if tokens else 0
    for part in (2, 4):
        if length >= 2 * part:
            yield (
                f"{length // part} tokens in the place of {length}",
                _cut(inputs, 1, length, length // part),
            )


def _cut(inputs: ExampleInputs, dim: int, size: int, smaller: int) -> ExampleInputs:
    def cut(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        for place in range(dim, len(shape) if dim else min(1, len(shape))):
            if shape[place] == size:
                shape[place] = smaller
        return tensor.new_empty(shape)

    return inputs.map(cut)


def _largest_block(fitting: Fitting) -> int:
    """Bytes of the weights of the largest block, which FSDP gathers while it runs."""
    model = fitting.shadow.model
    sizes = [
        sum(p.numel() * p.element_size() for p in model.get_submodule(site).parameters())
        for site in fitting.sites
    ]
    return max(sizes, default=0)


def _qlora(fitting: Fitting, above: int) -> int:
    """Weights of frozen Linears in 4 bits; where all weights train, adapters train in their place."""
    model = fitting.shadow.model
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    full = all(module.weight.requires_grad for module in linears)
    adapters = 0
    try:
        if full:
            model.requires_grad_(False)
            adapters = sum(_RANK * (m.in_features + m.out_features) for m in linears)
        states = model_state_bytes(model, fitting.optimizer, quantised=True)
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    # weights, gradients and two moments of the adapters
    own = 4 * _ADAPTER_WIDTH * adapters
    gradients = fitting.states.gradients if full else 0
    return states.parameters + states.optimizer + states.dequantised + own + above - gradients
