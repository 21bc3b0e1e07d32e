"""The public calls: plan, patch, report, unpatch."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from typing import Any, TypeVar, cast

from torch import nn

from lowmem_patch.config import ConfigLike, PatchConfig, given_config, load_config
from lowmem_patch.errors import ConfigError, NothingToPatchError, PatchError, TraceError
from lowmem_patch.memory.model_states import Training
from lowmem_patch.nn import gammas
from lowmem_patch.nn.checkpointing import is_switched_on
from lowmem_patch.nn.context import is_fsdp_unit
from lowmem_patch.nn.head import forget_reads, notes_of_heads
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import Own, within_compiled
from lowmem_patch.planning.changes import has_adapter, no_longer_as_patched, watch_forwards
from lowmem_patch.planning.check import check_outputs, refuse_unready, run_unpatched, runs_on_data
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.plan import Plan, apply_plan, trains_signature, undo
from lowmem_patch.planning.planner import (
    CHECKPOINTED,
    NOT_COUNTED,
    counted_after,
    plan_model,
    trace_whole,
)
from lowmem_patch.planning.report import NOTHING_TRAINS, RECORD, PatchReport, Record, find_records
from lowmem_patch.strategies.fold import folded_now
from lowmem_patch.strategies.swap import is_replacement
from lowmem_patch.tracing.base_model import checked_model
from lowmem_patch.tracing.example_inputs import inner_model
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import preserved
from lowmem_patch.tracing.shadow import Shadow
from lowmem_patch.tracing.sharded import came_sharded

Asked = tuple[str | int, Training]  # a budget, and what it is for
ModelT = TypeVar("ModelT", bound=nn.Module)


def plan_patch(
    model: nn.Module,
    preset: ConfigLike | None = None,
    *,
    example_inputs: Any = None,
    fit: str | int | None = None,
    optimizer: str = "adamw",
    accumulation: int = 1,
    gpus: int = 1,
    config: ConfigLike | None = None,
) -> PatchReport:
    """What ``patch_model`` would do. Touches nothing; works on the meta device.

    Args:
        model: a transformers, timm or other module; a PEFT model is planned with its adapters.
        preset: a preset's name (``auto``, ``exact``, ``compact``, ``paper``), a YAML path, a mapping or a
            PatchConfig; default: that of the patch that the model has, else ``auto``.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments for one forward;
            default: made from the model's config. Where the model itself has none (a SentenceTransformer,
            a LightningModule), the one model inside it that has is meant. Byte counts are for these
            inputs, and under the autocast context that is active around this call.
        fit: the bytes that a training step may take on one device, model states included: text with a unit
            (``"24GiB"``, ``"24GB"``, ``"24g"``), a number of bytes, or ``"auto"`` (what the GPU has free,
            less a reserve). Blocks run again in backward, only as far as that needs, in the least time.
            The example inputs, which must be given, say for which batch and length. Default: the config's
            ``fit``.
        optimizer: whose state counts, of ``lowmem_patch.memory.OPTIMIZERS``.
        accumulation: batches of a step; above 1 the budget counts their gradients, which are held meanwhile.
        gpus: over which FSDP2 will shard the model, block by block; the budget is then one of each GPU. DDP
            shards nothing.
        config: another name of ``preset``.

    Raises:
        ConfigError: ``model`` is no model, an unknown preset, key, value or optimizer, a budget that is no
            size, or ``optimizer``, ``accumulation`` or ``gpus`` without a budget.
        TraceError: the model cannot be run on the inputs.
        PatchError: the model is part of a larger model that is patched, torch.compile wraps it,
            torch.jit compiled it, or a weight has no shape yet.
        BudgetError: nothing fits in the budget; the text names the least one, and what would help.
    """
    checked_model(model, "plan_patch")
    config = given_config(preset, config, earlier_config(model))
    if example_inputs is None:
        model = _with_known_inputs(model)
    refuse_unready(model)
    resolved = load_config(config)
    asked = _asked(resolved, fit, optimizer, accumulation, gpus)
    _refuse_budget_of_no_batch(asked, example_inputs)
    return _planned(model, resolved, example_inputs, asked)[0]


def _refuse_other_than_bool(**given: object) -> None:
    for name, value in given.items():
        if type(value) is not bool:
            raise ConfigError(f"{name}={value!r} is neither True nor False")


def _asked(
    config: PatchConfig, fit: str | int | None, optimizer: str, accumulation: int, gpus: int
) -> Asked | None:
    """The budget of the call, or of the config."""
    if type(accumulation) is not int or accumulation < 1:
        raise ConfigError(f"accumulation {accumulation!r} is no number of batches: 1 or more")
    if type(gpus) is not int or gpus < 1:
        raise ConfigError(f"gpus {gpus!r} is no number of GPUs: 1 or more")
    budget = config.fit if fit is None else fit
    if budget is not None:
        return budget, Training(optimizer, accumulates=accumulation > 1, gpus=gpus)
    given = {"optimizer": optimizer, "accumulation": accumulation, "gpus": gpus}
    usual = {"optimizer": "adamw", "accumulation": 1, "gpus": 1}
    read = " and ".join(
        f"{name}={value!r}" for name, value in given.items() if value != usual[name]
    )
    if read:
        raise ConfigError(
            f"only a budget reads {read}: give fit=, such as fit='24GiB', or leave it out"
        )
    return None


def _refuse_budget_of_no_batch(asked: Asked | None, example_inputs: Any) -> None:
    if asked is not None and example_inputs is None:
        raise ConfigError(
            f"fit={asked[0]!r} is a budget for one batch: give example_inputs of the batch size and the "
            "length that you train with"
        )


def _planned(
    model: nn.Module, config: PatchConfig, example_inputs: Any, asked: Asked | None
) -> tuple[PatchReport, Plan, ExampleInputs]:
    planned = plan_model(model, config, example_inputs)
    if asked is not None:
        planned = fit_planned(model, planned, *asked)
    found, on_data = (planned.report, planned.plan, planned.inputs), planned.shadow.mode is None
    del planned
    if on_data:  # the errors for which it ran on data hold what that saved, as much as a step
        gc.collect()
    return found


def _planned_anew(
    model: nn.Module, config: PatchConfig, example_inputs: Any, asked: Asked | None
) -> tuple[PatchReport, Plan, ExampleInputs]:
    """As `_planned`. A patched model keeps its patch where this raises; one whose trace needs data, for which
    that patch is in the way, loses it here."""
    try:
        return _planned(model, config, example_inputs, asked)
    except TraceError:
        if not find_records(model) or asked is not None or came_sharded(model):
            raise
        if not runs_on_data(model, example_inputs):
            raise
    _unpatch(model)
    return _planned(model, config, example_inputs, asked)


def patch_model(
    model: ModelT,
    preset: ConfigLike | None = None,
    *,
    example_inputs: Any = None,
    fit: str | int | None = None,
    optimizer: str = "adamw",
    accumulation: int = 1,
    gpus: int = 1,
    strict: bool = False,
    check: bool = False,
    config: ConfigLike | None = None,
) -> ModelT:
    """Patch a model in place so that autograd keeps less, and return it.

    The model's class, parameter names and state-dict keys stay. Patching again with the same config does
    nothing; with another one, with ``example_inputs`` or ``check``, or on a changed model, it re-plans.

    Args:
        model, preset, example_inputs, fit, optimizer, accumulation, gpus, config: as in :func:`plan_patch`.
        strict: raise instead of warn when no site is patched or no parameter trains.
        check: run the original and the patched model on the example inputs, and put everything back
            if the outputs differ by more than rounding.

    Raises:
        ConfigError, TraceError, BudgetError: as in :func:`plan_patch`; the model is as it was, and keeps the
            patch that it had.
        PatchError: as in :func:`plan_patch`; or applying or checking failed, and the model is unpatched.
        NothingToPatchError: ``strict``, and nothing would be patched or trains; the model is as it was.

    Example:
        >>> model = patch_model(model, fit="23GiB", example_inputs=batch)  # a card of 24 GiB
    """
    checked_model(model, "patch_model")
    _refuse_other_than_bool(strict=strict, check=check)
    config = given_config(preset, config, earlier_config(model))
    resolved, outer = load_config(config), model
    asked = _asked(resolved, fit, optimizer, accumulation, gpus)
    if example_inputs is None:
        model = _with_known_inputs(model)
        if not check and _is_patched_so(model, resolved, asked):
            return outer
    refuse_unready(model)
    _refuse_budget_of_no_batch(asked, example_inputs)
    report, plan, inputs = _planned_anew(model, resolved, example_inputs, asked)
    _say_if_nothing(report, plan, strict)
    _say_if_budget_ends(model, asked)
    _unpatch(model)
    before = run_unpatched(model, inputs) if check else None
    apply_plan(model, plan)
    try:
        _complete(model, report, plan, inputs, before, asked)
    except Exception as error:  # whatever went wrong, the model must be put back first
        undo(model)
        model.__dict__.pop(RECORD, None)
        if isinstance(error, PatchError):
            raise
        raise PatchError(f"the patch was undone: the patched model failed: {error}") from error
    return outer


def _complete(
    model: nn.Module, report: PatchReport, plan: Plan, inputs: Any, before: Any, asked: Asked | None
) -> None:
    """What is left to do on a model whose patches are there: the check, the report and the hooks.
    ``before``: what the unpatched model gave, None where nobody asked for the check."""
    if before is not None:
        check_outputs(before, model, inputs)
        forget_reads(model)  # of the check
    if not report.saved_after:  # a run of the patched model tells
        with preserved(model):
            after = trace_whole(Shadow(model, inputs, None), structure=False)
        notes = tuple(note for note in report.notes if note != NOT_COUNTED)
        report = dataclasses.replace(report, **counted_after(report, after), notes=notes)
    _attach(model, report, asked)
    watch_forwards(model, plan, adapters=report.config.linear_inputs != "keep")


def earlier_config(model: nn.Module) -> ConfigLike:
    """That of the patch that the model has, as long as no other one is asked for; else ``auto``."""
    records = find_records(within_compiled(model) or model)
    return records[0][1].report.config if len(records) == 1 else "auto"


def _with_known_inputs(model: ModelT) -> ModelT:
    """The model itself, or the transformers, timm or diffusers model that it holds and that trains."""
    return model if RECORD in model.__dict__ else cast(ModelT, inner_model(model))


def _is_patched_so(model: nn.Module, config: PatchConfig, asked: Asked | None) -> bool:
    """Whether nothing is to do; of a budget counts what was asked, not what a GPU has free now."""
    model = within_compiled(model) or model
    records = find_records(model)
    if len(records) != 1:
        return False
    holder, record = records[0]
    same = record.report.config == config and record.signature == trains_signature(model)
    return same and record.fit == asked and not no_longer_as_patched(holder)


def _say_if_budget_ends(model: nn.Module, asked: Asked | None) -> None:
    """Warn where an earlier patch had a budget, which is not taken over: it was one of another batch and
    optimizer."""
    budgets = [record.fit[0] for _, record in find_records(model) if record.fit is not None]
    if budgets and asked is None:
        warnings.warn(
            f"this patch has no budget, and takes the place of one with fit={budgets[0]!r}: give fit= and "
            "example_inputs= again to keep it",
            stacklevel=3,
        )


def _attach(model: nn.Module, report: PatchReport, fit: Asked | None) -> None:
    """Leave on the model what reports and undoing ask for, and its own hooks."""
    if any(site.strategy == "fold" for site in report.sites):
        register: Any = model.register_load_state_dict_pre_hook  # has no types
        register(Own(_refuse_unfolded_weights))
    report = dataclasses.replace(report, applied=True)
    model.__dict__[RECORD] = Record(report, trains_signature(model), fit)
    norms = tuple(m for m in model.modules() if isinstance(m, MSNorm) and not m.folded)
    if norms:
        gammas.check_gammas(norms)  # for a compiler, under which nobody checks
        model.register_forward_pre_hook(Own(gammas.check_before_forward, norms))
        model.register_forward_hook(Own(gammas.forget_after_forward, norms), always_call=True)


def patch_report(model: nn.Module) -> PatchReport:
    """What ``patch_model`` did to this model (or to the model inside a PEFT wrapper), and in the notes
    what is no longer so, and who read logits whole.

    Raises:
        ConfigError: ``model`` is no model.
        PatchError: it is not patched.
    """
    checked_model(model, "patch_report")
    records = find_records(model)
    if not records and any(map(is_replacement, model.modules())):
        raise PatchError(
            f"this {type(model).__name__} is a part of a patched model, which alone has the report. Where "
            "the whole is gone (PEFT's merge_and_unload takes it away), call unpatch_model(model), then "
            "patch_model(model)"
        )
    if not records:
        raise PatchError(
            f"this {type(model).__name__} is not patched: call patch_model(model) first"
        )
    holder, record = records[0]
    notes = [note for note in record.report.notes if note != CHECKPOINTED]
    if is_switched_on(holder):  # since the patch, or before it
        notes.append(CHECKPOINTED)
    notes += [*no_longer_as_patched(holder), *notes_of_heads(holder)]
    if tuple(notes) == record.report.notes:
        return record.report
    return dataclasses.replace(record.report, notes=tuple(notes))


def unpatch_model(model: ModelT) -> ModelT:
    """Put the original modules back and unfold the weights; returns the model.

    Weights that were folded are divided by gamma again in float64, so they agree with the original up
    to one rounding of their dtype. Where adapters were added on folded weights after patching, the
    weights stay folded (the adapters were made for them), and a warning says so. A part of a patched model
    (what PEFT's ``merge_and_unload`` returns) is put back as well; the rest of that model stays patched. A
    model that is not patched is returned as it is.

    Raises:
        ConfigError: ``model`` is no model.
        PatchError: FSDP2 sharded it after it was patched, norms among it.
    """
    checked_model(model, "unpatch_model")
    modules = list(model.modules())
    if any(map(is_fsdp_unit, modules)) and any(
        is_replacement(m) and m._parameters for m in modules
    ):
        raise PatchError(
            "the patched model was sharded by FSDP2 (fully_shard), which gathers weights in the very modules "
            "that unpatch_model would replace: save its weights (torch.distributed.checkpoint.state_dict), "
            "and load them into an unpatched model, whose names are the same"
        )
    _unpatch(model)
    _put_back(model)  # of a whole that nobody holds any more
    return model


def _unpatch(model: nn.Module) -> None:
    """Put back each model that was patched as a whole, and no part of another."""
    for holder, _ in find_records(model):
        _put_back(holder)
        del holder.__dict__[RECORD]


def _put_back(model: nn.Module) -> None:
    steps = [folded.step for folded in folded_now(model)]
    modules = dict(model.named_modules())
    adapted = [  # an adapter was put on one of the Linears
        step.norm
        for step in steps
        if any(has_adapter(modules.get(ref.module)) for ref in step.linears)
    ]
    if adapted:
        warnings.warn(
            f"{len(adapted)} norms stay folded, because adapters were added on the folded weights "
            f"({adapted[0]}, ...): the model computes the same, and is a stock model whose norms are "
            "identities. The adapters fit these weights alone: save the whole model, or patch after "
            "get_peft_model",
            stacklevel=4,
        )
    undo(model, unfolds=not adapted)


def _say_if_nothing(report: PatchReport, plan: Plan, strict: bool) -> None:
    """Warn, or raise where ``strict``, if nothing trains or nothing is patched."""
    reasons = dict.fromkeys(f"{site.name}: {site.reason}" for site in report.sites)
    unknown = "it has no norm or activation that lowmem-patch knows"
    listed = "; ".join(list(reasons)[:3] or report.notes) or unknown
    waits = all(patch.for_autocast for patch in plan.patches)
    if NOTHING_TRAINS in report.notes:
        text = f"{report.model}: {NOTHING_TRAINS}"
    elif not plan.patches or (waits and report.saved_after >= report.saved_before):
        beside = ", but for autocast" if plan.patches else ""
        text = f"nothing was patched in {report.model}{beside}: {listed}"
    else:
        return
    if strict:
        raise NothingToPatchError(text)
    warnings.warn(text, stacklevel=3)


def _refuse_unfolded_weights(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Refuse before anything was loaded, so that the model stays whole."""
    for name, module in model.named_modules():
        if isinstance(module, MSNorm) and module.folded:
            gammas.refuse_unfolded(module, state_dict, f"{prefix}{name}." if name else prefix)
