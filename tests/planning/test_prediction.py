"""A plan says what will be saved; a real step saves that. Also after what trains has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError
from lowmem_patch.planning.costs import device_of, run_seconds
from lowmem_patch.planning.planner import facts_and_plan
from lowmem_patch.strategies.checkpointing import find_blocks
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.saved_bytes import SavedBytes
from tests.support.models import EVERY_FAMILY, FAMILIES, Inputs, build, in_each
from tests.support.step import MODES, cast, in_mode
from tests.support.tiers import slow_but

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


QUICK = [(name, mode) for name in ("llama", "bert", "timm-vit") for mode in ("bf16", "autocast")]


@pytest.mark.parametrize(
    ("name", "mode_name"), slow_but(in_each(EVERY_FAMILY, "bf16", "autocast"), *QUICK)
)
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


@pytest.mark.filterwarnings("ignore:.*no parameter trains")
def test_a_budget_of_a_model_that_does_not_train_is_refused() -> None:
    model, inputs = build(FAMILIES["llama"]), FAMILIES["llama"].inputs()
    with pytest.raises(BudgetError, match=r"no parameter trains.*call get_peft_model"):
        patch_model(model.requires_grad_(False), example_inputs=inputs, fit="1GiB")


def test_the_time_of_a_lora_layer_is_that_of_its_one_op() -> None:
    """Not of PEFT's, which makes float32 copies of the input."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=8,
    )  # fmt: skip
    seconds = {}
    for name in ("full", "lora"):
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
        if name == "lora":
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        inputs = make_example_inputs(model, batch_size=4, sequence_length=2048)
        facts, plan, _ = facts_and_plan(model.train(), load_config("auto"), inputs, [])
        blocks = find_blocks(facts)
        seconds[name] = run_seconds(facts, blocks, device_of(model), plan.patches)[0]
        if name == "lora":
            seconds["peft"] = run_seconds(facts, blocks, device_of(model))[0]
    # its base Linears' weights have no gradient, a third of the products of a step
    assert seconds["lora"].forward == pytest.approx(seconds["full"].forward, rel=0.05)
    assert 0.5 < seconds["lora"].backward / seconds["full"].backward < 0.8
    assert seconds["peft"].forward > 1.2 * seconds["lora"].forward
