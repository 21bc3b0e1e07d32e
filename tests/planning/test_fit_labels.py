"""Budgets for the batches that users have: labels of their own, a trained prefix without a cache."""

from __future__ import annotations

from typing import Any

import pytest
from peft import PrefixTuningConfig, TaskType, get_peft_model

from lowmem_patch import plan_patch
from tests.support.fitted import (
    fitted,
    held_beside,
    host_memory,
    llama_of,
    made,
    planned_once,
    tokens,
)
from tests.support.live import LiveBytes
from tests.support.step import warned

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def counted_peak(model: Any, batch: dict[str, Any]) -> int:
    """Of a step as users write it, beside model states and host memory."""
    with warned():
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.ignore(*model.parameters(), *model.buffers(), *held_beside(model), *host_memory(model))
        live.count(*(value for value in batch.values() if not isinstance(value, bool)))
        with warned():
            model(**batch).loss.backward()
        return live.peak


def assert_held(model: Any, batch: dict[str, Any]) -> None:
    """Without a budget and within one the prediction is at most 3 % above what the step takes."""
    with planned_once():
        whole = plan_patch(model, "exact", example_inputs=batch, fit="1TiB").fit
        assert whole is not None
        states = whole.parameters + whole.optimizer_state
        budgets = whole.predicted, states + 9 * (whole.predicted - states) // 10
        steps = [fitted(model, batch, budget, "exact") for budget in budgets]
    for patched, report in steps:
        counted = counted_peak(patched, batch)
        assert counted <= report.predicted - states <= 1.03 * counted, report.levels


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "decoder"), [(16, 64), (64, 16)])
def test_given_labels_tell_the_length_of_the_decoder(encoder: int, decoder: int) -> None:
    batch = {"input_ids": tokens(3, encoder), "labels": tokens(3, decoder)}
    assert_held(made("t5")[0], batch)


@pytest.mark.slow
def test_labels_beside_the_tokens_are_counted() -> None:
    assert_held(made("llama")[0], {"input_ids": tokens(), "labels": tokens().clone()})


def test_a_trained_prefix_without_a_cache_is_planned() -> None:
    prefix = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    model = get_peft_model(llama_of(num_hidden_layers=3), prefix).train()
    batch = {"input_ids": tokens(), "labels": tokens().clone(), "use_cache": False}
    found = plan_patch(model, "exact", example_inputs=batch, fit="1TiB").fit
    assert found is not None
    assert found.levels == {"patched": 3}
