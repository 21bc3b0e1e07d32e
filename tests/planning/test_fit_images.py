"""Budgets of models that place images among words, whose shapes depend on values of their inputs."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.errors import BudgetError
from tests.support.checkpointed import assert_same_bits, one_step
from tests.support.fitted import assert_predicted, fitted, least_of, planned_once
from tests.support.step import warned
from tests.support.tiers import slow_but
from zoo.build import build_transformers
from zoo.heads import head_class_of

TYPES = ["llava", "idefics3", "qwen2_5_vl"]


def made(model_type: str) -> tuple[Any, dict[str, Any]]:
    """A model with a head, and a batch with images."""
    built = build_transformers(model_type, head_class_of)
    inputs = built.inputs.kwargs
    assert "pixel_values" in inputs
    model: Any = built.model.train()
    model.config.get_text_config().use_cache = False
    return model, {**inputs, "labels": inputs["input_ids"]}


@pytest.mark.parametrize("model_type", slow_but(TYPES, "llava"))
def test_a_step_within_a_budget_is_the_patched_one(model_type: str) -> None:
    model, inputs = made(model_type)
    with planned_once():
        with warned(), pytest.raises(BudgetError) as error:
            plan_patch(model, "exact", example_inputs=inputs, fit=1001)
        fitting, report = fitted(model, inputs, least_of(str(error.value)), "exact")
    assert_predicted(report, fitting, inputs)
    with warned():
        patched = patch_model(model, "exact", example_inputs=inputs)
        notes = patch_report(patched).notes
        assert_same_bits(one_step(fitting, inputs), one_step(patched, inputs))
    assert not any("traced with data" in note for note in notes)
