"""Patch one model with each preset and judge it: function, dtypes, state dict, checkpoint, bytes, undo."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from lowmem_patch import PatchReport, patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.errors import TraceError
from lowmem_patch.verify.step_derivatives import Codes, with_step_derivatives
from zoo.build import Built
from zoo.dataflow import read_dataflow
from zoo.errors import Comparison, compare_gradients, compare_outputs
from zoo.precision import FLOAT32, Precision, in_precision
from zoo.products import products
from zoo.result import PresetResult, Result
from zoo.steps import Step, in_float64, jittered, run_step

Reload = Callable[[Any, str], Any]
# the more often a model is jittered, the surer its kinks show (a maximum that another element takes)
_JITTERS = (4, 24)


class _Noise:
    """Steps of the unpatched model that differ from its own by roundings, made when they are wanted."""

    def __init__(self, make: Callable[[int], Step]) -> None:
        self._make = make
        self._steps: list[Step] = []

    def first(self, count: int) -> list[Step]:
        while len(self._steps) < count:
            self._steps.append(self._make(len(self._steps)))
        return self._steps[:count]

    def judge(self, compare: Callable[[list[Step]], Comparison]) -> tuple[Comparison, bool]:
        """Without noise and, where that misses its budget, with more and more of it."""
        comparison = compare([])
        if comparison.right:
            return comparison, False
        for count in _JITTERS:
            comparison = compare(self.first(count))
            if comparison.right:
                break
        return comparison, True


class _Reference:
    """The unpatched model in float64 and in its precision and, where a budget is missed, under jitter."""

    def __init__(self, built: Built, precision: Precision) -> None:
        self.model = model = built.model
        self.inputs = inputs = built.inputs
        self.precision = precision
        self.own = {train: self.step(copy.deepcopy(model), train) for train in (False, True)}
        self.truth = {}
        wide = in_float64(model)
        for train in (False, True):
            self.truth[train] = run_step(wide, inputs, train=train, float64=True)
        self.noise = {train: _Noise(partial(self._jittered, train)) for train in (False, True)}

    def step(self, model: Any, train: bool) -> Step:
        """One step of any model, in the precision that is judged."""
        return run_step(model, self.inputs, train=train, precision=self.precision)

    def _jittered(self, train: bool, seed: int) -> Step:
        return self.step(jittered(self.model, seed, self.precision), train)


def judge(
    built: Built,
    reload: Reload | None = None,
    presets: tuple[str, ...] | None = None,
    precision: Precision = FLOAT32,
) -> Result:
    """Judge one model. Nothing that the package raises is caught but by name in the result.

    Args:
        built: in float32.
        reload: writes a patched model to a folder and loads it as a stock model; None: not judged.
        presets: None: those of the precision.
    """
    result = Result(
        built.name, "judged", parameters=built.parameters, shrink=built.shrink, feed=built.feed
    )
    result.inputs = str(built.inputs)
    try:
        built = in_precision(built, precision)
        # a first forward may replace modules (BigBird picks its attention by the length of the text)
        with torch.no_grad():  # what it leaves on the model must be fit for a copy (LeViT's tables)
            run_step(built.model, built.inputs, train=False, precision=precision)
        reference = _Reference(built, precision)
    except Exception as error:  # whatever a foreign forward raises in float64 or in training mode
        result.status, result.reason = "no reference", f"{type(error).__name__}: {str(error)[:200]}"
        _plan_only(built, result)
        return result
    if not all(
        torch.isfinite(t).all() for s in reference.truth.values() for t in s.outputs
    ) or not all(torch.isfinite(g).all() for g in reference.own[True].gradients.values()):
        result.status, result.reason = "no reference", "the unpatched model gives NaN or infinity"
        _plan_only(built, result)
        return result
    lasting = _lasting_buffers(built, precision)
    for preset in presets or precision.presets:
        result.presets[preset] = _judge_preset(built, preset, reference, lasting, reload, result)
    result.settle(precision.jump)
    return result


def _plan_only(built: Built, result: Result) -> None:
    try:
        report = _planned(built, "auto")
        result.describe(report, read_dataflow(built.model, built.inputs, report))
    except TraceError as error:
        # refused by name, as it must be: the model asks for more in training mode, labels for example
        result.status, result.reason = "not run", f"in training mode: {error}"
    except Exception as error:
        result.presets["auto"] = PresetResult(
            "wrong", [f"planning raised {type(error).__name__}: {error}"]
        )


def _planned(built: Built, preset: str) -> PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_patch(built.model, preset, example_inputs=built.inputs)


def _judge_preset(
    built: Built,
    preset: str,
    reference: _Reference,
    lasting: Set[str],
    reload: Reload | None,
    result: Result,
) -> PresetResult:
    patched = copy.deepcopy(built.model)
    identities = _identities(patched, lasting)
    found = PresetResult()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch_model(patched, preset, example_inputs=built.inputs)
        report = patch_report(patched)
        found.count(report)
        if preset == "auto" and reference.precision.tells_all:
            result.describe(report, read_dataflow(built.model, built.inputs, report))
        _judge_patched(built, preset, patched, report, reference, reload, found)
        unpatch_model(patched)
        _judge_unpatched(built, patched, lasting, identities, reference, found)
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error  # the zoo's own limit, no finding
        found.wrong(f"raised {type(error).__name__}: {str(error)[:300]}")
    return found


def _identities(model: nn.Module, buffers: Set[str]) -> dict[str, int]:
    """The very objects that a model consists of, with those ``buffers``."""
    named: list[tuple[str, Any]] = [*model.named_modules(), *model.named_parameters()]
    named += [(name, buffer) for name, buffer in model.named_buffers() if name in buffers]
    return {f"{type(thing).__name__} {name}": id(thing) for name, thing in named}


def _lasting_buffers(built: Built, precision: Precision) -> set[str]:
    """Buffers that a forward does not replace: some models put a new tensor in their place (I-BERT)."""
    model = copy.deepcopy(built.model)
    before = dict(model.named_buffers())
    run_step(model, built.inputs, train=True, precision=precision)
    after = dict(model.named_buffers())
    return {name for name, buffer in before.items() if after.get(name) is buffer}


def _judge_patched(
    built: Built,
    preset: str,
    patched: Any,
    report: PatchReport,
    reference: _Reference,
    reload: Reload | None,
    found: PresetResult,
) -> None:
    if list(patched.state_dict()) != list(built.model.state_dict()):
        found.wrong("other state-dict keys")
    if any(not site.reason for site in report.sites):
        found.wrong("a site without a reason")
    steps = {train: reference.step(patched, train) for train in (False, True)}
    for train in (False, True):
        _note(found, "forward", _outputs(steps[train], reference, train))
        _judge_dtypes(steps[train].dtypes, reference.own[train].dtypes, found)
    if reference.precision.is_low:
        computed, expected = (
            products(model, built.inputs, reference.precision)
            for model in (patched, copy.deepcopy(built.model))
        )
        if computed != expected:
            found.wrong(f"products {_shares(computed)}, unpatched {_shares(expected)}")
    found.saved_before, found.saved_after = reference.own[True].saved, steps[True].saved
    if found.saved_after > found.saved_before:
        found.wrong(f"keeps {found.saved_after} bytes, unpatched {found.saved_before}")
    if report.floor > report.saved_after:
        found.wrong(f"floor of {report.floor} bytes above {report.saved_after} that are saved")
    # a plan is made without autocast
    if found.saved_after != report.saved_after and reference.precision.autocast is None:
        found.notes.append(f"plan said {report.saved_after} bytes")
    _note(found, "gradient", _gradients(steps[True], patched, report, reference))
    if reload is not None and report.patched:
        with tempfile.TemporaryDirectory() as folder:
            stock = _reloaded(built, patched, reload, folder, found)
        if stock is None:
            return
        _note(found, "reload", _outputs(reference.step(stock, False), reference, False))


def _judge_dtypes(
    ours: dict[str, torch.dtype], own: dict[str, torch.dtype], found: PresetResult
) -> None:
    for name in sorted(set(ours) & set(own)):  # that none lacks is judged with the numbers
        if ours[name] != own[name]:
            found.wrong(f"dtype: {name} is {ours[name]}, unpatched {own[name]}")
            return


def _shares(counts: Counter[str]) -> str:
    return ", ".join(f"{count} in {dtype}" for dtype, count in counts.most_common()) or "none"


def _reloaded(
    built: Built, patched: Any, reload: Reload, folder: str, found: PresetResult
) -> Any | None:
    """The stock model, or None where not even the unpatched one can be written and read."""
    try:
        return reload(patched, folder)
    except Exception:
        try:
            reload(copy.deepcopy(built.model), f"{folder}/unpatched")
        except Exception as error:  # a config that its own class refuses, for example
            found.notes.append(f"not reloaded, the unpatched model neither: {str(error)[:80]}")
            return None
        raise


def _outputs(step: Step, reference: _Reference, train: bool) -> tuple[Comparison, bool]:
    own, truth = reference.own[train], reference.truth[train]
    return reference.noise[train].judge(
        partial(compare_outputs, reference.precision, step, own, truth)
    )


def _gradients(
    step: Step, patched: Any, report: PatchReport, reference: _Reference
) -> tuple[Comparison, bool]:
    """Against a stock model with the weights that the patched one has now (folded ones, too), whose
    activations have the derivative that the step tables give where codes are kept."""
    bits, precision = report.config.bits, reference.precision
    codes = {site.name: Codes(site.kind, bits) for site in report.sites if site.strategy == "codes"}
    if not report.fold_steps and not codes:
        model, own, truth = reference.model, reference.own[True], reference.truth[True]
    else:
        model = _twin(reference.model, patched, codes)
        # a copy, since a run may leave tensors on a model that cannot be copied (RecurrentGemma)
        own = reference.step(copy.deepcopy(model), True)
        truth = run_step(in_float64(model), reference.inputs, train=True, float64=True)

    def noisy(seed: int) -> Step:
        if codes and seed < 2:
            shift = (-precision.shift, precision.shift)[seed]
            twin = _twin(reference.model, patched, codes, shift)
        else:
            twin = jittered(model, seed, precision)
        return reference.step(twin, True)

    return _Noise(noisy).judge(partial(compare_gradients, precision, step, own, truth))


def _twin(
    original: nn.Module, patched: nn.Module, codes: dict[str, Codes], shift: float = 0.0
) -> nn.Module:
    twin = copy.deepcopy(original)
    twin.load_state_dict(patched.state_dict())
    trains = {name: parameter.requires_grad for name, parameter in patched.named_parameters()}
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(trains[name])
    return with_step_derivatives(twin, codes, shift)


def _note(found: PresetResult, what: str, judged: tuple[Comparison, bool]) -> None:
    """Keep the worst error of each kind, and say what is wrong or moves under one rounding."""
    comparison, jittered_too = judged
    if comparison.jumps > found.undecided.get(what, (0, 0))[0]:
        found.undecided[what] = (comparison.jumps, comparison.tensors)
    previous = found.errors.get(what)
    if previous is None or not comparison.error <= previous[0]:
        found.errors[what] = (comparison.error, comparison.own)
    if not comparison.right:
        found.wrong(
            f"{what}: {comparison.where} is off by {comparison.error:.1e}, "
            f"the unpatched model by {comparison.own:.1e}"
        )
    elif jittered_too:
        found.notes.append(
            f"{what}: {comparison.where} of the unpatched model moves by {comparison.own:.1e} when its "
            f"weights move by one rounding; patched off by {comparison.error:.1e}"
        )


def _judge_unpatched(
    built: Built,
    model: Any,
    lasting: Set[str],
    identities: dict[str, int],
    reference: _Reference,
    found: PresetResult,
) -> None:
    if _identities(model, lasting) != identities:
        found.wrong("unpatch leaves other modules or parameters")
    trains = {name: parameter.requires_grad for name, parameter in built.model.named_parameters()}
    if {name: parameter.requires_grad for name, parameter in model.named_parameters()} != trains:
        found.wrong("unpatch leaves other parameters training")
    _note(found, "unpatch", _outputs(reference.step(model, False), reference, False))
