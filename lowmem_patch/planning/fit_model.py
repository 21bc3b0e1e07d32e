"""From a planned patch and a budget to the blocks that run again; or what would help where nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from lowmem_patch.errors import BudgetError
from lowmem_patch.memory.model_states import FEWEST_BYTES, Training
from lowmem_patch.planning.budget import Budget, free_host_bytes, make_budget
from lowmem_patch.planning.costs import scaled, timed_forward, with_measured_host
from lowmem_patch.planning.fit import NO_BLOCKS, Fitting
from lowmem_patch.planning.names import size_text
from lowmem_patch.planning.plan import apply_plan, undo
from lowmem_patch.planning.planner import Planned
from lowmem_patch.planning.report import NOTHING_TRAINS, find_records
from lowmem_patch.planning.suggestions import Base, Suggestion, smaller_suggestions

_WORTH = 0.05  # of the least budget: a change that saves less and does not suffice is not proposed


def fit_planned(
    model: nn.Module,
    planned: Planned,
    fit: str | int,
    training: Training,
    *,
    host: int | None = None,
    timed: bool | None = None,
) -> Planned:
    """The plan with the patches of the blocks that run again, and the report with what was chosen.

    Args:
        fit: as in ``patch_model``.
        training: its optimizer, whether frozen Linears are counted in 4 bits, as QLoRA will have them,
            whether gradients of earlier batches are held, and over how many GPUs FSDP2 shards the model.
        host: bytes of host memory for inputs of blocks; default: half of what is available.
        timed: time a forward of the model; default: where it is on a GPU.

    Raises:
        ConfigError: a budget that is no size, an unknown optimizer, or quantised weights on several GPUs.
        BudgetError: nothing fits, or the model cannot run on fake tensors.
    """
    budget = make_budget(fit, model)
    fitting = fitting_of(model, planned, fit, training, host=host, timed=timed)
    fitted = fitting.fit(budget, planned.report.inputs)
    if fitted is None:
        least = fitting.total(fitting.least[1], budget)
        raise BudgetError(_too_small(fitting, budget, least, planned.report.inputs), least)
    patches, chosen = fitted
    plan = dataclasses.replace(planned.plan, patches=(*planned.plan.patches, *patches))
    report = dataclasses.replace(planned.report, fit=chosen)
    return planned._replace(plan=plan, report=report)


def fitting_of(
    model: nn.Module,
    planned: Planned,
    fit: str | int,
    training: Training,
    *,
    host: int | None,
    timed: bool | None = None,
) -> Fitting:
    """The steps of a planned model, from which levels for a budget are chosen; as `fit_planned`.

    Raises:
        ConfigError: an unknown optimizer, or quantised weights on several GPUs.
        BudgetError: nothing trains, or the model cannot run on fake tensors.
    """
    if NOTHING_TRAINS in planned.report.notes:
        raise BudgetError(f"fit={fit!r}: {NOTHING_TRAINS}")
    if planned.shadow.mode is None:
        raise BudgetError(
            f"fit={fit!r}: this {type(model).__name__} runs on data alone, so its step cannot be planned: "
            "leave fit away, and use the library's own checkpointing; or, if training skips layers at random "
            f"(layerdrop), turn that off. On fake tensors: {planned.shadow.needs_data}"
        )
    host = free_host_bytes() if host is None else host
    timed = any(parameter.is_cuda for parameter in model.parameters()) if timed is None else timed
    # a clock times the patched forward; the shares of its parts were compared with measured steps as they are
    patches = () if timed else planned.plan.patches
    shadow, facts = planned.shadow, planned.facts
    fitting = Fitting(model, shadow, facts, training, patches=patches, host=host)
    if timed and fitting.blocks.runs:
        fitting.seconds = scaled(fitting.seconds, _timed(model, planned, fitting.sites))
        fitting.device = with_measured_host(fitting.device, next(model.parameters()).device)
    return fitting


def _timed(model: nn.Module, planned: Planned, sites: Sequence[str]) -> tuple[float, ...]:
    """Seconds of each run by a clock, the model patched meanwhile, unless it is patched, or weights would
    change."""
    device = next(model.parameters()).device
    there = planned.inputs.map(lambda tensor: tensor.to(device))
    if planned.plan.folded or find_records(model):
        return timed_forward(model, there, sites)
    apply_plan(model, planned.plan)
    try:
        return timed_forward(model, there, sites)
    finally:
        undo(model)


def _too_small(fitting: Fitting, budget: Budget, least: int, inputs: str) -> str:
    levels, timeline = fitting.least
    peak, part = fitting.beside(timeline), fitting.need(timeline).part
    more = sum(
        fitting.seconds_of(number, levels.get(site, "patched"))
        for number, site in enumerate(fitting.ran)
    )
    found_suggestions = smaller_suggestions(
        Base(fitting, fitting.shadow.model, budget, peak, more),
        lambda smaller: fitting.beside(fitting.run(levels, inputs=smaller)),
    )
    suggestions = sorted(found_suggestions, key=lambda suggestion: -suggestion.total)
    states = fitting.states
    weights, workspace = states.parameters, states.workspace + states.rounding
    lines = []
    if budget.bare and budget.bytes <= weights:
        meant = f"{budget.bytes}GiB" if budget.bytes < FEWEST_BYTES else "24GiB"
        lines.append(f'fit={budget.bytes} is {budget.bytes} bytes: did you mean fit="{meant}"?')
    lines.append(
        f"fit {budget.asked}: no training step of this model fits. The least budget is "
        f"{size_text(least, up=True)} ({least} bytes) for {inputs} and "
        f"{fitting.training.optimizer}"
        + (f" on each of {fitting.training.gpus} GPUs: " if fitting.sharding else ": ")
        + f"parameters {size_text(weights)}, optimizer state {size_text(states.optimizer)}, "
        f"gradients and activations {size_text(peak + fitting.earlier)} in {fitting.name(part)}"
        + (" (with what FSDP2 gathers)" if fitting.sharding else "")
        + (f", DDP's buckets {size_text(states.buckets)}" if states.buckets else "")
        + (f", cuBLAS's workspaces and rounding {size_text(workspace)}" if workspace else "")
    )
    if budget.bytes <= weights:
        lines.append("the parameters alone are larger than the budget")
    elif budget.bytes <= states.resident:
        beside = " and workspaces" if workspace else ""
        lines.append(f"the model states{beside} alone are larger than the budget")
    if not fitting.blocks.blocks:
        lines.append(NO_BLOCKS)
    # the inputs of all blocks may be more than the host may hold
    wanted = fitting.choices.on_host(fitting.all_at("host")) if fitting.free else 0
    if wanted > fitting.host:
        lines.append(
            f"the inputs of blocks may wait in {size_text(fitting.host)} of host memory, half of what is "
            f"available; with {size_text(2 * wanted, up=True)} available the least budget may be smaller"
        )
    lines += _helps(suggestions, budget.bytes, least)
    return "\n".join(lines)


def _helps(suggestions: Sequence[Suggestion], budget: int, least: int) -> list[str]:
    """The changes that suffice, and those that save enough to be worth one."""
    helps = [
        suggestion
        for suggestion in suggestions
        if suggestion.total <= max(budget, (1 - _WORTH) * least)
    ]
    heading = "each of these changes makes the least budget smaller; one that says fits is enough:"
    if all(suggestion.total > budget for suggestion in helps):
        heading = "each of these changes makes the least budget smaller; none is enough by itself:"
    lines = [
        f"  {suggestion.name}: {size_text(suggestion.total)}"
        + (", fits" if suggestion.total <= budget else "")
        for suggestion in helps
    ]
    return [heading, *lines] if lines else []
