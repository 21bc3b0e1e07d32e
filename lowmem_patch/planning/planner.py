"""From a model and a config to a plan and its report: trace, plan, and trace again what was planned."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import PatchError, TraceError
from lowmem_patch.nn.checkpointing import is_switched_on
from lowmem_patch.nn.gammas import assume_gammas
from lowmem_patch.planning.apply import apply_plan, undo
from lowmem_patch.planning.floor import count_floor
from lowmem_patch.planning.notes import note_of_dropouts, notes_of_no_sites
from lowmem_patch.planning.plan import Plan, make_plan
from lowmem_patch.planning.report import (
    NOTHING_TRAINS,
    BytesByKind,
    PatchReport,
    block_rows,
    by_block,
    find_records,
)
from lowmem_patch.strategies.fold import folded_now
from lowmem_patch.strategies.protocol import Affines, Facts
from lowmem_patch.strategies.swap import is_replacement
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs, as_example_inputs
from lowmem_patch.tracing.isolation import (
    ForeignKernelError,
    is_offloaded,
    preserved,
    without_checkpointing,
)
from lowmem_patch.tracing.shadow import DataNeededError, Shadow, make_shadow
from lowmem_patch.tracing.sharded import came_sharded
from lowmem_patch.tracing.trace import Trace, trace_forward

_OF_THE_WHOLE = (
    "the model came sharded: planned, and counted, on the whole model that its config makes, of which a "
    "device keeps its part"
)
SMALL = ", a small example made from the config"
_CHECKPOINTED = (
    "activation checkpointing is on: bytes are counted as without it, and are saved while a block runs "
    "again; at the end of the forward autograd holds the inputs of blocks alone"
)
_MADE_FROM_CONFIG = (
    "These inputs were made from its config: pass a batch of your own as example_inputs="
)
NOT_COUNTED = "bytes after are counted by patch_model: planning runs no patched forward on data"


class Planned(NamedTuple):
    """What was planned.

    Attributes:
        report, plan: what will be done.
        inputs: for which it was planned.
        facts: of the trace of the unpatched model.
        shadow: the copy that was traced, patched now; where it has no mode, the model itself, unpatched.
    """

    report: PatchReport
    plan: Plan
    inputs: ExampleInputs
    facts: Facts
    shadow: Shadow


def facts_and_plan(
    model: nn.Module, config: PatchConfig, inputs: ExampleInputs, notes: list[str]
) -> tuple[Facts, Plan, Shadow]:
    """What a trace tells, the plan, and the copy that was traced, unpatched.

    Args:
        notes: gets what a report must say of the trace.

    Raises:
        TraceError, PatchError: as `plan_model`.
    """
    shadow, trace, originals = _traced(model, inputs, notes)
    facts = Facts(model, shadow.model, trace, originals, on_meta=shadow.elsewhere)
    return facts, make_plan(facts, config), shadow


def plan_model(model: nn.Module, config: PatchConfig, example_inputs: Any) -> Planned:
    """The report, the plan and what they were made from; nothing is touched.

    Raises:
        TraceError: the model cannot be run on the inputs.
        PatchError: the model is part of a larger model that is patched.
    """
    if example_inputs is None:
        with preserved(model):  # inputs are drawn
            inputs = make_example_inputs(model)
    else:
        inputs = as_example_inputs(example_inputs)
    described = _describe(inputs) + (SMALL if example_inputs is None else "")
    notes: list[str] = []
    try:
        facts, plan, shadow = facts_and_plan(model, config, inputs, notes)
    except TraceError as error:
        if example_inputs is not None:
            raise
        raise TraceError(f"{error}. {_MADE_FROM_CONFIG}") from error
    trace = facts.trace
    if came_sharded(model):
        notes.append(_OF_THE_WHOLE)
    if is_switched_on(model):
        notes.append(_CHECKPOINTED)
    notes += [*plan.notes, *notes_of_no_sites(facts, {site.name for site in plan.sites})]
    if not shadow.elsewhere:
        notes += note_of_dropouts(facts)
    # inputs may have gradients, as those of a frozen part of a larger model
    if not (trace.saved.activations or any(p.requires_grad for p in model.parameters())):
        notes.append(NOTHING_TRAINS)
    floor = count_floor(facts)
    report = PatchReport(
        model=type(model).__name__,
        config=config,
        sites=plan.sites,
        inputs=described,
        saved_before=trace.saved.activations,
        saved_after=0,
        weight_copies_before=trace.saved.weight_copies,
        blocks=tuple((block, size, 0) for block, size in by_block(trace.saved).items()),
        notes=tuple(notes),
        floor=floor.total,
        floor_blocks=floor.by_block,
        kinds=BytesByKind(before=trace.saved.by_kind, floor=floor.by_kind),
    )
    if shadow.mode is not None:
        apply_plan(shadow.model, plan, arithmetic=False)
        assume_gammas(model, shadow.model)
        report = dataclasses.replace(
            report, **counted_after(report, trace_whole(shadow, structure=False))
        )
    return Planned(report, plan, inputs, facts, shadow)


def trace_whole(shadow: Shadow, *, structure: bool = True) -> Trace:
    """As :func:`trace_forward`, of blocks as they run again where another library checkpoints them."""
    with without_checkpointing(shadow.model):
        return trace_forward(shadow, structure=structure)


def _traced(
    model: nn.Module, inputs: ExampleInputs, notes: list[str]
) -> tuple[Shadow, Trace, Affines]:
    """Trace a shadow, or, where the model cannot run without data, the model itself; and the affines that
    an earlier patch folded away."""
    try:
        shadow, originals = _shadow_of_original(model, inputs)
    except DataNeededError as error:
        cause: TraceError = error
    else:
        try:
            return shadow, trace_whole(shadow), originals
        except TraceError as error:
            cause = error
    if came_sharded(model) or find_records(model):
        raise cause
    if any(p.is_meta for p in model.parameters()) and not is_offloaded(model):
        raise TraceError(
            f"{cause}. On the meta device there is no data to run it with instead: give the model its "
            "weights first"
        ) from cause
    with preserved(model):
        shadow = Shadow(model, inputs, None, needs_data=str(cause))
        try:
            trace = trace_whole(shadow)
        except TraceError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise TraceError(
                    f"{error}. The unpatched model runs on these inputs once, since it cannot run on fake "
                    "tensors: give example_inputs of a smaller batch or length, and train with larger ones "
                    f"afterwards. On fake tensors: {cause}"
                ) from error
            if isinstance(cause.__cause__, ForeignKernelError):
                raise TraceError(
                    f"{error}. A kernel of its own runs on its own device alone: move the model there "
                    '(model.to("cuda")) before it is patched'
                ) from error
            raise
    notes.append(f"traced with data, since the forward cannot run without: {cause}")
    notes.append(NOT_COUNTED)
    return shadow, trace, {}


def _shadow_of_original(model: nn.Module, inputs: ExampleInputs) -> tuple[Shadow, Affines]:
    """A shadow of the model as it was before any patch, and the affines that were folded away."""
    shadow = make_shadow(model, inputs)
    originals: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for holder, _ in find_records(shadow.model):
        prefix = next(name for name, module in shadow.model.named_modules() if module is holder)
        for folded in folded_now(holder):
            name = f"{prefix}.{folded.step.norm}" if prefix else folded.step.norm
            originals[name] = (folded.gamma, folded.beta)
        undo(holder, arithmetic=False)
    if any(is_replacement(module) for module in shadow.model.modules()):
        raise PatchError(
            f"this {type(model).__name__} is part of a patched model, or shares modules with one: "
            "patch or plan that one, or call unpatch_model on that one or on this first. PEFT's "
            "merge_and_unload returns such a part: merged = unpatch_model(merged), then "
            "merged.requires_grad_(True) or new adapters, then patch_model(merged)"
        )
    return shadow, originals


def counted_after(report: PatchReport, trace: Trace) -> dict[str, Any]:
    """The fields of a report that a run of the patched model gives."""
    own, after = trace.saved.own, by_block(trace.saved)
    before = {block: size for block, size, _ in report.blocks}
    sites = tuple(
        dataclasses.replace(site, bytes_after=own.get(site.name, site.bytes_after))
        if site.patched
        else site
        for site in report.sites
    )
    return {
        "sites": sites,
        "saved_after": trace.saved.activations,
        "weight_copies_after": trace.saved.weight_copies,
        "kinds": dataclasses.replace(report.kinds, after=trace.saved.by_kind),
        "blocks": block_rows(before, after),
    }


def _describe(inputs: ExampleInputs) -> str:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return (
                f"{inputs}, autocast {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
            )
    return str(inputs)
