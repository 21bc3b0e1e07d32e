"""Every family, preset and dtype: outputs and gradients against float64, state dict, report, undo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from tests.support.configs import FOLD
from tests.support.judge import (
    UNFOLDED,
    assert_accurate,
    assert_close,
    assert_gradients,
    assert_outputs,
)
from tests.support.models import FAMILIES, in_each
from tests.support.step import FP32, MODES, cast, in_mode, step, truth_of, twin_of

Make = Callable[[str], Any]


@pytest.mark.parametrize(("name", "mode_name"), in_each(FAMILIES, "fp32", "bf16", "autocast"))
def test_every_family_keeps_its_function_and_gradients(
    name: str, mode_name: str, make: Make
) -> None:
    mode = MODES[mode_name]
    inputs = in_mode(FAMILIES[name].inputs(), mode)
    model = cast(make(name), mode.weights)
    truth, own = truth_of(model, inputs), step(model, inputs, mode)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        shared = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
        folded = patch_model(copy.deepcopy(model), FOLD, example_inputs=inputs)
    found = step(shared, inputs, mode)
    assert_accurate(found, own, truth, mode)
    found = step(folded, inputs, mode)
    assert_outputs(found, own, truth, mode)
    # gradients of folded weights are those of a stock model with these weights
    twin = twin_of(model, folded)
    assert_gradients(found, step(twin, inputs, mode), truth_of(twin, inputs), mode)


# `exact` does what `auto` does, but for codes, and is what the test above patches with
@pytest.mark.parametrize("preset", ["paper", "auto"])
@pytest.mark.parametrize("name", FAMILIES)
def test_plan_is_what_patching_does_and_undoes(name: str, preset: str, make: Make) -> None:
    inputs = FAMILIES[name].inputs()
    model = make(name)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    identities = {key: id(module) for key, module in model.named_modules()}
    trains = {key: p.requires_grad for key, p in model.named_parameters()}
    truth, before = truth_of(model, inputs), step(model, inputs, FP32)

    plan = plan_patch(model, preset, example_inputs=inputs)
    assert {key: id(module) for key, module in model.named_modules()} == identities
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())

    assert patch_model(model, preset, example_inputs=inputs) is model
    report = patch_report(model)
    assert report == plan
    assert_outputs(step(model, inputs, FP32), before, truth, FP32)
    assert list(model.state_dict()) == list(values)
    changed = {key for key, module in model.named_modules() if id(module) != identities[key]}
    # a chain is a forward of the module that calls its functions
    assert changed == {site.name for site in report.patched if site.kind != "chain"}
    assert bool(report.fold_steps) == (preset == "paper" and FAMILIES[name].folds)

    torch.manual_seed(3)
    with saved_bytes(model) as saved:
        output = model.train()(**inputs)
    del output
    assert saved.activations == report.saved_after
    assert saved.weight_copies == report.weight_copies_after
    assert report.saved_after < report.saved_before

    patched_modules = {key: id(module) for key, module in model.named_modules()}
    patch_model(model, preset)
    assert {key: id(module) for key, module in model.named_modules()} == patched_modules
    assert patch_report(model).sites is report.sites  # notes say by now who has read logits

    unpatch_model(model.eval())
    assert {key: id(module) for key, module in model.named_modules()} == identities
    assert {key: p.requires_grad for key, p in model.named_parameters()} == trains
    for key, value in model.state_dict().items():
        assert_close(value, values[key], key, UNFOLDED)
    assert_accurate(step(model, inputs, FP32), before, truth)
