"""Which module a saved storage counts with, where several hold it."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch.planning.names import human_bytes
from tests.support.models import FAMILIES, build

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("head_trains", [False, True])
def test_a_frozen_head_saves_none_of_a_norms_output(head_trains: bool) -> None:
    """Its logits wait, and hold the output until the loss has read them."""
    family = FAMILIES["llama"]
    model = get_peft_model(build(family), LoraConfig(r=4, target_modules=family.linears)).train()
    model.base_model.model.lm_head.requires_grad_(head_trains)
    inputs = family.inputs()
    inputs |= {"labels": inputs["input_ids"]}
    patch_model(model, "exact", example_inputs=inputs)
    with saved_bytes(model) as saved:
        output = model(**inputs)
    assert output.loss.requires_grad
    (site,) = (s for s in patch_report(model).sites if s.name.endswith("model.norm"))
    whole = saved.by_module[site.name]
    rows, width = inputs["input_ids"].numel(), model.config.hidden_size
    assert whole == rows * width * 4 + rows * 4
    assert site.bytes_after == (rows * 4 if head_trains else whole)


def test_a_report_says_what_modules_without_a_row_save() -> None:
    family = FAMILIES["llama"]
    model = build(family).bfloat16()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=family.linears)).train()
    report = plan_patch(model, "auto", example_inputs=family.inputs())
    sites = sum(site.bytes_before - site.bytes_after for site in report.sites)
    rest = report.saved_before - report.saved_after - sites
    assert sites > 0 and rest > 0
    said = f"the sites save {human_bytes(sites)} less, modules that are not in the table {human_bytes(rest)}"
    assert said in " ".join(str(report).split())
    first = next(site for site in report.sites if "layers.0.input" in site.name)
    assert (first.bytes_before, first.bytes_after) == (0, 0)
    assert "nothing up to it trains" in first.reason
    assert sum("nothing up to it trains" in site.reason for site in report.sites) == 1
