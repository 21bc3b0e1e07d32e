"""A budget for steps of several batches, whose gradients are held: against two of them, counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.errors import BudgetError, ConfigError
from lowmem_patch.memory import run_step
from lowmem_patch.memory.model_states import model_state_bytes
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.tracing.inputs import as_example_inputs
from lowmem_patch.tracing.live_storages import LiveStorages
from tests.support.fitted import host_memory, made, measured_peak, planned_once, tokens
from tests.support.models import llama_of
from tests.support.step import warned
from tests.support.tiers import slow_but

pytestmark = [pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")]


class CountedPeak(LiveStorages):
    most = 0

    def grown(self, now: int) -> None:
        self.most = max(self.most, now)


def second_batch(model: Any, inputs: Any) -> int:
    """Bytes at the peak of a second batch, gradients of the first included, other model states excluded."""
    inputs = as_example_inputs(inputs)
    with warned():
        run_step(model, inputs)
    states = (*model.parameters(), *model.buffers(), *host_memory(model))
    with CountedPeak(states) as live:
        for tensor in (*inputs.args, *inputs.kwargs.values()):
            live.add(tensor)
        for parameter in model.parameters():
            if parameter.grad is not None:
                live.add(parameter.grad)
        run_step(model, inputs)
    return live.most


def fit_of(model: Any, inputs: Any, budget: Any, accumulation: int = 2) -> tuple[Any, FitReport]:
    model = copy.deepcopy(model)
    with warned():
        patch_model(model, "exact", example_inputs=inputs, fit=budget, accumulation=accumulation)
    report = patch_report(model).fit
    assert report is not None
    return model, report


def assert_counted(model: Any, inputs: Any, report: FitReport) -> None:
    measured = second_batch(model, inputs)
    predicted = report.predicted - report.parameters - report.optimizer_state
    assert measured <= predicted <= 1.03 * measured, (report.levels, predicted, measured)


@pytest.mark.parametrize("name", slow_but(["llama", "llama-lora", "whisper"], "llama"))
def test_the_peak_of_a_second_batch_is_predicted_and_the_budget_holds_it(name: str) -> None:
    model, inputs = made(name)
    with planned_once():
        assert_second_batch_is_held(model, inputs)


def assert_second_batch_is_held(model: Any, inputs: Any) -> None:
    whole, report = fit_of(model, inputs, "1GiB")
    assert_counted(whole, inputs, report)
    assert report.accumulates and "held from the beginning" in str(report)
    once = fit_of(model, inputs, "1GiB", 1)[1]
    assert once.predicted <= report.predicted <= once.predicted + report.gradients
    assert once.held == report.held
    states = report.parameters + report.optimizer_state + report.gradients
    budget = states + int(0.6 * (report.predicted - states))
    fitted, report = fit_of(model, inputs, budget)
    assert set(report.levels) != {"patched"} and report.predicted <= budget
    assert_counted(fitted, inputs, report)


@pytest.mark.slow
def test_many_blocks_are_planned_from_few() -> None:
    """Gradients of blocks that are not run are held, too."""
    model, inputs = llama_of(num_hidden_layers=8).train(), {"input_ids": tokens()}
    with planned_once():
        assert_few_stand_for_many(model, inputs)


def assert_few_stand_for_many(model: Any, inputs: Any) -> None:
    whole, report = fit_of(model, inputs, "1GiB")
    assert_counted(whole, inputs, report)
    room = report.predicted - report.parameters - report.optimizer_state - report.gradients
    budget = report.predicted - room // 3
    fitted, report = fit_of(model, inputs, budget)
    assert report.predicted <= budget and set(report.levels) != {"patched"}
    assert_counted(fitted, inputs, report)


def test_without_accumulation_a_second_batch_would_break_the_budget() -> None:
    model, inputs = llama_of(num_hidden_layers=6).train(), {"input_ids": tokens(1, 8)}
    whole, report = fit_of(model, inputs, "1GiB", 1)
    held = report.predicted - report.parameters - report.optimizer_state
    assert measured_peak(whole, inputs) <= held < second_batch(whole, inputs)
    assert any("with accumulation" in note for note in report.notes)


@pytest.mark.slow
def test_too_small_a_budget_counts_the_gradients() -> None:
    model, inputs = llama_of(num_hidden_layers=2).train(), {"input_ids": tokens()}
    least = []
    with planned_once(), warned():
        for accumulation in (1, 2):
            with pytest.raises(BudgetError) as error:
                plan_patch(
                    model, "exact", example_inputs=inputs, fit=1000, accumulation=accumulation
                )
            assert error.value.least is not None
            least.append(error.value.least)
        patch_model(model, "exact", example_inputs=inputs, fit=least[1], accumulation=2)
    gradients = model_state_bytes(model, "adamw").gradients
    assert least[0] < least[1] <= least[0] + gradients
    found = patch_report(model).fit
    assert found is not None and found.predicted <= least[1]


def test_another_accumulation_is_planned_again() -> None:
    model, inputs = llama_of(num_hidden_layers=2).train(), {"input_ids": tokens()}
    with warned():
        patch_model(model, "exact", example_inputs=inputs, fit="1GiB", accumulation=4)
        first = patch_report(model)
        patch_model(model, "exact", fit="1GiB", accumulation=8)  # what is held is the same
        assert patch_report(model) is first
        patch_model(model, "exact", example_inputs=inputs, fit="1GiB")
    again = patch_report(model).fit
    assert again is not None and not again.accumulates


@pytest.mark.parametrize("accumulation", [0, -1, True, 1.5, "2"])
def test_what_is_no_number_of_batches(accumulation: Any) -> None:
    model, inputs = made("llama")
    with pytest.raises(ConfigError, match="accumulation"):
        plan_patch(model, example_inputs=inputs, fit="1GiB", accumulation=accumulation)
