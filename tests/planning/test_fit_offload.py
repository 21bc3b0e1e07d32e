"""A budget for a device with memory of its own: what blocks save is offloaded before they run again."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError
from lowmem_patch.memory.model_states import USUAL_TRAINING
from lowmem_patch.nn import offloading
from lowmem_patch.planning import costs, fit
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.planner import plan_model
from lowmem_patch.planning.solve import Choice, Step, solve
from tests.support.fitted import (
    assert_predicted,
    fitted,
    least_of,
    made,
    planned_once,
)
from tests.support.judge import assert_equal
from tests.support.stacks import rows, stack
from tests.support.step import step, warned
from tests.support.tiers import slow_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def device_apart(monkeypatch: pytest.MonkeyPatch) -> costs.Device:
    """A device so slow that copies to its host take no time beside."""
    device = costs.Device("a slow device", 1e6, 1e6, 1e12)
    monkeypatch.setattr(fit, "device_of", lambda model: device)
    monkeypatch.setattr(offloading, "_LEAST", 0)
    return device


@pytest.mark.parametrize("name", slow_but(["llama", "llama-lora", "bert", "t5", "swin"], "llama"))
def test_what_is_offloaded_is_predicted_and_computes_the_same(name: str) -> None:
    model, inputs = made(name)
    config = "auto" if "lora" in name else "exact"
    with planned_once():
        whole = plan_patch(model, config, example_inputs=inputs, fit="1TiB").fit
        assert whole is not None and set(whole.levels) == {"patched"}
        patched, _ = fitted(model, inputs, whole.predicted, config)
        wanted = step(copy.deepcopy(patched), inputs)
        states = whole.parameters + whole.optimizer_state
        budget = states + int(0.85 * (whole.predicted - states))
        again, report = fitted(model, inputs, budget, config)
        assert report.levels.get("offloaded", 0) > 0 and report.on_host > 0
        assert_predicted(report, again, inputs)
        assert_equal(step(again, inputs), wanted)


def test_a_cpu_offloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "device_of", lambda model: costs._CPU)
    whole = plan_patch(stack(), "exact", example_inputs=rows(), fit="1GiB").fit
    assert whole is not None
    states = whole.parameters + whole.optimizer_state
    budget = int(states + 0.75 * (whole.predicted - states))
    report = plan_patch(stack(), "exact", example_inputs=rows(), fit=budget).fit
    assert report is not None and "offloaded" not in report.levels


@pytest.mark.slow
def test_host_memory_bounds_what_is_offloaded() -> None:
    model, x = stack(count=5), rows()
    plan = plan_model(model, load_config("exact"), x)
    with planned_once():
        whole = fit_planned(model, plan, 1 << 40, USUAL_TRAINING).report.fit
        assert whole is not None
        states = whole.parameters + whole.optimizer_state
        budget = int(states + 0.7 * (whole.predicted - states))
    levels = {}
    # buffers are up to twice as large
    for host in (0, 2 * (whole.blocks[0].patched + 8 * x.nbytes), 1 << 30):
        report = fit_planned(model, plan, budget, USUAL_TRAINING, host=host).report.fit
        assert report is not None and report.on_host <= host
        levels[host] = report.levels.get("offloaded", 0)
    none, little, much = levels.values()
    assert none == 0 < little < much


@pytest.mark.slow
def test_the_least_budget_of_a_host_with_little_memory_says_so() -> None:
    model, x = stack(count=12), rows().repeat(32, 1, 1)
    plan = plan_model(model, load_config("exact"), x)
    least, said = [], []
    for host in (0, 1 << 30):
        with planned_once(), pytest.raises(BudgetError) as error:
            fit_planned(model, plan, 1000, USUAL_TRAINING, host=host)
        least.append(least_of(str(error.value)))
        said.append("of host memory, half of" in str(error.value))
    assert least[0] > least[1]
    assert said == [True, False]


def test_a_patched_model_says_what_is_offloaded() -> None:
    model, inputs = made("llama")
    with planned_once():
        with pytest.raises(BudgetError) as error:
            plan_patch(model, "exact", example_inputs=inputs, fit=1000)
        whole = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB").fit
        assert whole is not None
        budget = (least_of(str(error.value)) + 3 * whole.predicted) // 4
        with warned():
            patch_model(model, "exact", example_inputs=inputs, fit=budget)
    report = patch_report(model)
    assert report.fit is not None and report.fit.levels["offloaded"] > 0
    assert "offloaded to host memory" in str(report)


@pytest.mark.slow
def test_a_cache_that_is_asked_for_is_filled_without_a_warning() -> None:
    """No block runs again, so nothing more is saved than planned."""
    model, inputs = made("llama")
    with planned_once(), warned():
        whole = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB").fit
        assert whole is not None
        states = whole.parameters + whole.optimizer_state
        budget = states + int(0.9 * (whole.predicted - states))
        patch_model(model, "exact", example_inputs=inputs, fit=budget)
    with warned():
        report = patch_report(model).fit
        assert report is not None and set(report.levels) == {"patched", "offloaded"}
        model(**inputs)
    with warnings.catch_warnings(action="error"):
        cache = model(**inputs, use_cache=True).past_key_values
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]


# the solver


def test_copies_that_take_too_long_wait_or_stand_apart() -> None:
    patched = Choice("patched", 40, 50, 50, 0.0, keeps_input=False)
    away = Choice("offloaded", 0, 50, 50, 0.01, keeps_input=False, copy=2.0, window=2.5)
    again = Choice("checkpointed", 0, 50, 50, 1.0, keeps_input=False)
    steps = [Step((patched, away, again), 4, 4, i, forward=1.0) for i in range(12)]
    last = [Step((patched, again), 4, 4, i, forward=1.0) for i in range(12, 15)]
    half = solve([*steps, *last], 8 * 40 + 50)
    assert half is not None and half.levels.count("offloaded") == 6
    assert half.seconds == pytest.approx(0.06)  # nothing waits, so no two stand side by side
    assert "offloaded offloaded" not in " ".join(half.levels)
    more = solve([*steps, *last], 7 * 40 + 50)
    assert more is not None and more.levels.count("offloaded") == 7
    assert 0.5 <= more.seconds - 0.07 < 1.0  # one waits, for less than it takes to run again
    most = solve([*steps, *last], 3 * 40 + 50)
    assert most is not None and most.levels.count("checkpointed") > 0
    slow = [
        dataclasses.replace(
            s, choices=tuple(dataclasses.replace(c, copy=20 * c.copy) for c in s.choices)
        )
        for s in steps
    ]
    found = solve([*slow, *last], 9 * 40 + 50)
    assert found is not None and found.levels.count("checkpointed") >= 5
