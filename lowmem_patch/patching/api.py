"""The public calls: plan, patch, report, unpatch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowmem_patch.errors import NothingToPatchError, PatchError, TraceError
from lowmem_patch.nn.gammas import GammaCheck
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.patching.apply import (
    Applied,
    apply_plan,
    folded_now,
    is_replacement,
    undo,
)
from lowmem_patch.patching.check import check_outputs, run_real
from lowmem_patch.patching.config import PatchConfig, load_config
from lowmem_patch.patching.first_forward import (
    has_adapter,
    no_longer_as_patched,
    stop_watching,
    watch_first_forward,
)
from lowmem_patch.patching.floor import count_floor
from lowmem_patch.patching.notes import foreign_kernels_note, functional_calls_note, not_run_note
from lowmem_patch.patching.plan import DropoutPatch, Plan, make_plan, trains_signature
from lowmem_patch.patching.rotary import rotary_note
from lowmem_patch.patching.sites import BytesByKind, FoldStep, PatchReport, block_name
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs, as_example_inputs
from lowmem_patch.tracing.isolation import ForeignKernelError, is_offloaded, preserved
from lowmem_patch.tracing.shadow import DataNeededError, Shadow, make_shadow
from lowmem_patch.tracing.sharded import came_sharded
from lowmem_patch.tracing.trace import Trace, trace_forward

__all__ = ["patch_model", "patch_report", "plan_patch", "unpatch_model"]

ConfigLike = str | Path | Mapping[str, Any] | PatchConfig
ModelT = TypeVar("ModelT", bound=nn.Module)
_RECORD = "_lowmem_patch_record"
_OF_THE_WHOLE = (
    "the model came sharded: planned, and counted, on the whole model that its config makes, of which a "
    "device keeps its part"
)
_NOT_COUNTED = "bytes after are counted by patch_model: planning runs no patched forward on data"


@dataclasses.dataclass
class Record:
    """What ``patch_model`` leaves on the model: enough to report, re-plan and undo."""

    report: PatchReport
    applied: Applied
    signature: int
    hook: Any = None


def plan_patch(
    model: nn.Module, config: ConfigLike = "auto", *, example_inputs: Any = None
) -> PatchReport:
    """What ``patch_model`` would do. Touches nothing; works on the meta device.

    Args:
        model: a transformers, timm or other module; a PEFT model is planned with its adapters.
        config: a preset's name (``auto``, ``exact``, ``paper``), a YAML path, a mapping or a PatchConfig.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments for one forward;
            default: made from the model's config. Byte counts are for these inputs, and under the
            autocast context that is active around this call.

    Raises:
        ConfigError: an unknown preset, key or value.
        TraceError: the model cannot be run on the inputs.
        PatchError: the model is part of a larger model that is patched.
    """
    return _planned(model, load_config(config), example_inputs)[0]


def patch_model(
    model: ModelT,
    config: ConfigLike = "auto",
    *,
    example_inputs: Any = None,
    strict: bool = False,
    check: bool = False,
) -> ModelT:
    """Patch a model in place so that autograd keeps less, and return it.

    The model's class, parameter names and state-dict keys stay. Patching again with the same config
    does nothing; with another config, with ``example_inputs`` or ``check``, or after the model has
    changed, it re-plans from the original.

    Args:
        model, config, example_inputs: as in :func:`plan_patch`.
        strict: raise instead of warn when no site is patched.
        check: run the original and the patched model on the example inputs, and put everything back
            if the outputs differ by more than rounding.

    Raises:
        ConfigError, TraceError: as in :func:`plan_patch`; the model was not touched.
        PatchError: applying or checking failed; the model is as it was.
        NothingToPatchError: ``strict`` and nothing was patched.

    Example:
        >>> model = patch_model(model, "auto")
        >>> print(patch_report(model))
    """
    resolved = load_config(config)
    records = _find_records(model)
    if len(records) == 1 and example_inputs is None and not check:
        holder, record = records[0]
        same = record.report.config == resolved and record.signature == trains_signature(model)
        if same and not no_longer_as_patched(holder):
            return model
    unpatch_model(model)
    report, plan, inputs = _planned(model, resolved, example_inputs)
    if not (plan.patches or plan.adapters.layers or plan.rotations or plan.joint):
        _nothing(report, strict)
    before = run_real(model, inputs) if check else None
    applied = apply_plan(model, plan)
    try:
        if before is not None:
            check_outputs(before, run_real(model, inputs), model)
        if not report.saved_after:
            with preserved(model):
                after = trace_forward(Shadow(model, inputs, None), structure=False)
            notes = tuple(note for note in report.notes if note != _NOT_COUNTED)
            report = dataclasses.replace(report, **_after(report, after), notes=notes)
    except Exception as error:  # whatever went wrong, the model must be put back first
        undo(model, applied)
        if isinstance(error, PatchError):
            raise
        raise PatchError(
            f"the patch was undone, since the patched model failed: {error}"
        ) from error
    hook = None
    if any(site.strategy == "fold" for site in report.sites):
        register: Any = model.register_load_state_dict_pre_hook  # has no types
        hook = register(_refuse_unfolded_weights)
    GammaCheck(m for m in model.modules() if isinstance(m, MSNorm) and not m.folded).attach(model)
    model.__dict__[_RECORD] = Record(report, applied, trains_signature(model), hook)
    watches = resolved.linear_inputs != "keep"
    given = (*plan.adapters.layers, *plan.rotations)
    watch_first_forward(model, plan.patches, given, report.fold_steps, adapters=watches)
    return model


def patch_report(model: nn.Module) -> PatchReport:
    """What ``patch_model`` did to this model (or to the model inside a PEFT wrapper), and in the notes
    what is no longer so.

    Raises:
        PatchError: the model is not patched.
    """
    records = _find_records(model)
    if not records:
        raise PatchError(
            f"this {type(model).__name__} is not patched: call patch_model(model) first"
        )
    holder, record = records[0]
    changed = tuple(no_longer_as_patched(holder))
    if not changed:
        return record.report
    return dataclasses.replace(record.report, notes=(*record.report.notes, *changed))


def unpatch_model(model: ModelT) -> ModelT:
    """Put the original modules back and unfold the weights; returns the model.

    Weights that were folded are divided by gamma again in float64, so they agree with the original up
    to one rounding of their dtype. Where adapters were added on folded weights after patching, the
    weights stay folded (the adapters were made for them), and a warning says so.
    """
    for holder, record in _find_records(model):
        _unpatch(holder, record)
    return model


def _unpatch(holder: nn.Module, record: Record) -> None:
    steps = [folded.step for folded in folded_now(holder, record.applied)]
    adapted = [step.norm for step in steps if _is_adapted(holder, step)]
    if adapted:
        warnings.warn(
            f"{len(adapted)} norms stay folded, because adapters were added on the folded weights "
            f"({adapted[0]}, ...): the model computes the same, and is a stock model whose norms are "
            "identities. The adapters fit these weights alone: save the whole model, or patch after "
            "get_peft_model",
            stacklevel=3,
        )
    undo(holder, record.applied, unfold=not adapted)
    stop_watching(holder)
    GammaCheck.detach(holder)
    del holder.__dict__[_RECORD]
    if record.hook is not None:
        record.hook.remove()


def _is_adapted(model: nn.Module, step: FoldStep) -> bool:
    """Whether an adapter was put on one of the Linears."""
    modules = dict(model.named_modules())
    return any(has_adapter(modules.get(reference.module)) for reference in step.linears)


def _find_records(model: nn.Module) -> list[tuple[nn.Module, Record]]:
    """The records of this model and of modules inside it, with the modules that hold them."""
    return [(m, m.__dict__[_RECORD]) for m in model.modules() if _RECORD in m.__dict__]


def _planned(
    model: nn.Module, config: PatchConfig, example_inputs: Any
) -> tuple[PatchReport, Plan, ExampleInputs]:
    if example_inputs is None:
        with preserved(model):  # inputs are drawn
            inputs = make_example_inputs(model)
    else:
        inputs = as_example_inputs(example_inputs)
    originals: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    notes: list[str] = []
    shadow, trace = _traced(model, inputs, originals, notes)
    plan = make_plan(model, shadow.model, trace, config, originals)
    if came_sharded(model):
        notes.append(_OF_THE_WHOLE)
    notes += plan.adapters.notes
    dropouts = sum(isinstance(patch, DropoutPatch) for patch in plan.patches.values())
    if dropouts:
        notes.append(f"dropouts whose mask is kept in bits, one for each element: {dropouts}")
        if shadow.elsewhere:
            notes.append("before, a mask is counted as a GPU keeps it: a byte for each element")
    functional = functional_calls_note(trace, (site.name for site in plan.sites))
    not_run = not_run_note(shadow.model, trace)
    fuses = config.attention == "fused"
    rotary = rotary_note(shadow.model, trace, plan.rotations) if fuses else None
    if plan.joint:
        notes.append(
            f"gradients of q, k, v that are joined in one pass, for speed: {len(plan.joint)}"
        )
    foreign = foreign_kernels_note(shadow.model, trace)
    notes += [note for note in (rotary, functional, not_run, foreign) if note is not None]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        notes.append("no parameter trains, so nothing is kept: patch again once something does")
    floor = count_floor(shadow.model, trace)
    report = PatchReport(
        model=type(model).__name__,
        config=config,
        sites=plan.sites,
        inputs=_describe(inputs),
        saved_before=trace.saved.activations,
        saved_after=0,
        weight_copies_before=trace.saved.weight_copies,
        blocks=tuple((block, size, 0) for block, size in _by_block(trace).items()),
        notes=tuple(notes),
        floor=floor.total,
        floor_blocks=floor.by_block,
        kinds=BytesByKind(before=trace.saved.by_kind, floor=floor.by_kind),
    )
    if shadow.mode is not None:
        apply_plan(shadow.model, plan, arithmetic=False)
        report = dataclasses.replace(
            report, **_after(report, trace_forward(shadow, structure=False))
        )
    return report, plan, inputs


def _traced(
    model: nn.Module,
    inputs: ExampleInputs,
    originals: dict[str, tuple[Tensor | None, Tensor | None]],
    notes: list[str],
) -> tuple[Shadow, Trace]:
    """Trace a shadow, or, where the model cannot run without data, the model itself."""
    try:
        shadow = _shadow_of_original(model, inputs, originals)
    except DataNeededError as error:
        cause: TraceError = error
    else:
        try:
            return shadow, trace_forward(shadow)
        except TraceError as error:
            cause = error
    if came_sharded(model) or _find_records(model):
        raise cause
    if any(p.is_meta for p in model.parameters()) and not is_offloaded(model):
        raise TraceError(
            f"{cause}. On the meta device there is no data to run it with instead: give the model its "
            "weights first"
        ) from cause
    with preserved(model):
        shadow = Shadow(model, inputs, None)
        try:
            trace = trace_forward(shadow)
        except TraceError as error:
            if isinstance(cause.__cause__, ForeignKernelError):
                raise TraceError(
                    f"{error}. A kernel of its own runs on its own device alone: move the model there "
                    '(model.to("cuda")) before it is patched'
                ) from error
            raise
    notes.append(f"traced with data, since the forward cannot run without: {cause}")
    notes.append(_NOT_COUNTED)
    return shadow, trace


def _shadow_of_original(
    model: nn.Module,
    inputs: ExampleInputs,
    originals: dict[str, tuple[Tensor | None, Tensor | None]],
) -> Shadow:
    """A shadow of the model as it was before any patch; ``originals`` gets the affines folded away."""
    shadow = make_shadow(model, inputs)
    for holder, record in _find_records(shadow.model):
        prefix = next(name for name, module in shadow.model.named_modules() if module is holder)
        for folded in record.applied.folded:
            name = f"{prefix}.{folded.step.norm}" if prefix else folded.step.norm
            originals[name] = (folded.gamma, folded.beta)
        stop_watching(holder)
        GammaCheck.detach(holder)
        undo(holder, record.applied, arithmetic=False)
    if any(is_replacement(module) for module in shadow.model.modules()):
        raise PatchError(
            f"this {type(model).__name__} is part of a patched model, or shares modules with one: "
            "patch or plan that one, or call unpatch_model on it first"
        )
    return shadow


def _by_block(trace: Trace) -> dict[str, int]:
    blocks: dict[str, int] = {}
    for module, size in trace.saved.by_module.items():
        block = block_name(module)
        blocks[block] = blocks.get(block, 0) + size
    return blocks


def _after(report: PatchReport, trace: Trace) -> dict[str, Any]:
    """The fields of a report that a run of the patched model gives."""
    own, after = trace.saved.own, _by_block(trace)
    before = {block: size for block, size, _ in report.blocks}
    sites = tuple(
        dataclasses.replace(site, bytes_after=own.get(site.name, 0)) if site.patched else site
        for site in report.sites
    )
    return {
        "sites": sites,
        "saved_after": trace.saved.activations,
        "weight_copies_after": trace.saved.weight_copies,
        "kinds": dataclasses.replace(report.kinds, after=trace.saved.by_kind),
        "blocks": tuple(
            (block, before.get(block, 0), after.get(block, 0)) for block in {**before, **after}
        ),
    }


def _describe(inputs: ExampleInputs) -> str:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return (
                f"{inputs}, autocast {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
            )
    return str(inputs)


def _nothing(report: PatchReport, strict: bool) -> None:
    reasons = dict.fromkeys(f"{site.name}: {site.reason}" for site in report.sites)
    listed = "; ".join(list(reasons)[:3]) or "it has no norm or activation that lowmem-patch knows"
    text = f"nothing was patched in {report.model}: {listed}"
    if strict:
        raise NothingToPatchError(text)
    warnings.warn(text, stacklevel=3)


def _refuse_unfolded_weights(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Refuse before anything was loaded, so that the model stays whole."""
    for name, module in model.named_modules():
        if isinstance(module, MSNorm) and module.folded:
            module.refuse_unfolded(state_dict, f"{prefix}{name}." if name else prefix)
