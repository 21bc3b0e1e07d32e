"""A plan says what will be saved; a real step saves that. Also after what trains has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch.tracing.saved_bytes import SavedBytes
from tests.support.models import EVERY_FAMILY, FAMILIES, Inputs, build, in_each
from tests.support.step import MODES, cast, in_mode

# PEFT reads a name that transformers has since deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:fan_in_fan_out is set to False"
    ),  # as it shall be for Conv1D
]


def measured(model: Any, inputs: Inputs) -> SavedBytes:
    with saved_bytes(model) as saved:
        output = model.train()(**inputs)
    del output
    return saved


@pytest.mark.parametrize(("name", "mode_name"), in_each(EVERY_FAMILY, "bf16", "autocast"))
def test_a_step_with_adapters_saves_what_the_plan_says(name: str, mode_name: str) -> None:
    family, mode = EVERY_FAMILY[name], MODES[mode_name]
    inputs = in_mode(family.inputs(), mode)
    config = LoraConfig(r=2, target_modules=family.linears, lora_dropout=0.1)
    model = get_peft_model(cast(build(family), mode.weights), config)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode_name == "autocast"):
        planned = plan_patch(model, "auto", example_inputs=inputs) if mode_name == "bf16" else None
        before = measured(model, inputs)
        patch_model(model, "auto", example_inputs=inputs)
        after = measured(model, inputs)
    plan = patch_report(model)
    assert planned is None or planned == plan
    assert after.weight_copies == plan.weight_copies_after
    if "swin" in name and mode_name == "autocast":
        # torch's fake layer_norm of a bf16 input tells its statistics to be bf16; they are float32
        assert after.activations == pytest.approx(plan.saved_after, rel=0.01)
    else:
        assert after.activations == plan.saved_after
        assert before.activations == plan.saved_before


@pytest.mark.filterwarnings("ignore:.*no parameter trains")
def test_what_trains_is_planned_again() -> None:
    family = FAMILIES["llama"]
    model, inputs = build(family), family.inputs()
    patch_model(model, "exact", example_inputs=inputs)
    full = patch_report(model)
    assert {site.strategy for site in full.sites if site.kind == "silu"} == {"recompute"}
    for part, trains in (("down_proj", False), ("mlp", False), ("", False), ("q_proj", True)):
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.requires_grad_(trains)
        patch_model(model, "exact", example_inputs=inputs)
        report = patch_report(model)
        assert report is not full
        fresh = copy.deepcopy(build(family))
        for (_, mine), (_, theirs) in zip(
            model.named_parameters(), fresh.named_parameters(), strict=True
        ):
            theirs.requires_grad_(mine.requires_grad)
        assert report == plan_patch(fresh, "exact", example_inputs=inputs)
        assert measured(model, inputs).activations == report.saved_after
        full = report
