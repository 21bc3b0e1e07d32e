"""From a model and a config to a plan and its report: trace, plan, and trace again what was planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.errors import PatchError, TraceError
from lowmem_patch.nn.checkpointing import is_switched_on
from lowmem_patch.nn.gammas import assume_gammas
from lowmem_patch.planning.floor import count_floor
from lowmem_patch.planning.names import listed
from lowmem_patch.planning.plan import Plan, apply_plan, make_plan, undo
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
from lowmem_patch.tracing.call_arguments import attention_call, dropout_call
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs, as_example_inputs
from lowmem_patch.tracing.isolation import (
    ForeignKernelError,
    is_offloaded,
    preserved,
    without_checkpointing,
)
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import looks_like_norm, match_activation
from lowmem_patch.tracing.shadow import DataNeededError, Shadow, make_shadow
from lowmem_patch.tracing.sharded import came_sharded
from lowmem_patch.tracing.trace import Trace, describe, trace_forward

_OF_THE_WHOLE = (
    "the model came sharded: planned, and counted, on the whole model that its config makes, of which a "
    "device keeps its part"
)
_NAMED = 3  # of many modules of which a note speaks
SMALL = ", a small example made from the config"
CHECKPOINTED = (
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
        notes.append(CHECKPOINTED)
    notes += [*plan.notes, *_notes_of_no_sites(facts, {site.name for site in plan.sites})]
    if not shadow.elsewhere:
        notes += _note_of_dropouts(facts)
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


def _notes_of_no_sites(facts: Facts, sites: Collection[str]) -> Iterator[str]:
    """What a report says of norms and activations that are no sites."""
    if places := _functional_calls(facts, sites):
        yield (
            f"norms and activations that are called as functions, left alone: {len(places)} "
            f"({listed(dict.fromkeys(places), _NAMED)})"
        )
    if names := _not_run(facts):
        mend = "pass example_inputs= that reach them"
        if facts.shadow is facts.model:  # on fake tensors nothing is left to chance
            mend += ", or, if training skips layers at random (layerdrop), patch while that is turned off"
        yield (
            f"{len(names)} norms or activations did not run on the example inputs: left alone "
            f"({listed(names, _NAMED)}); {mend}"
        )
    if places := [describe(facts.modules[name], name) for name in facts.foreign_kernels]:
        named = listed(places, _NAMED)
        yield f"{len(places)} modules run kernels of their own, which are left alone ({named})"


def _note_of_dropouts(facts: Facts) -> Iterator[str]:
    """What a CPU saves of dropouts beyond what a GPU does, where the model lies on a CPU and has some."""
    ops = [op for op in facts.trace.ops if op.outputs and op.outputs[0].device.type == "cpu"]
    masks = attention = False
    for op in ops:
        if op.role.has(Role.DROPOUT):
            masks |= 0 < dropout_call(op.args, op.kwargs).p < 1
        elif op.name == "scaled_dot_product_attention":
            attention |= attention_call(op.name, op.args, op.kwargs).dropout_p > 0
    parts = ["the probabilities of attention, which runs as matmuls"] if attention else []
    parts += ["(unpatched) a mask as wide as the tensor"] if masks else []
    if parts:
        yield (
            f"for dropout a CPU saves {', and '.join(parts)}: a GPU saves fewer bytes, as inspect counts"
        )


def _functional_calls(facts: Facts, sites: Collection[str]) -> list[str]:
    """Where norms and activations are called as functions outside the sites."""
    called = {call.first_op for site in facts.functions.values() for call in site.calls}
    return [
        f"F.{op.name} in {op.module or 'the model itself'}"
        for number, op in enumerate(facts.trace.ops)
        # of activations those that save their input; an output is often saved by its reader anyway
        if (
            op.role.has(Role.ROW_NORM)
            or (op.name in STEP_TABLES and not op.role.has(Role.SAVES_OUTPUT))
        )
        and op.module not in sites
        and number not in called
    ]


def _not_run(facts: Facts) -> list[str]:
    """Norms and activations that did not run (an image tower, where the inputs are text)."""
    ran = {call.name for call in facts.trace.calls}
    # by type: an activation is told by running it, and experts are many
    known: dict[type, bool] = {}
    names = []
    for name, module in facts.shadow.named_modules():
        if name in ran:
            continue
        if type(module) not in known:
            known[type(module)] = looks_like_norm(module) or match_activation(module) is not None
        if known[type(module)]:
            names.append(name)
    return names
