"""A budget of each of several GPUs, over which FSDP2 will shard the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowmem_patch import BudgetError, ConfigError, patch_model, patch_report, plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.memory import Training
from lowmem_patch.memory.blocks import repeated_blocks
from lowmem_patch.memory.sharding import gathered
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.planner import plan_model
from tests.support.models import llama_of

BATCH = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
GPUS = 4


def fit_of(fit: str | int = "1GiB", **settings: Any) -> FitReport:
    model = llama_of(num_hidden_layers=8)
    found = plan_patch(model, "auto", example_inputs=BATCH, fit=fit, **settings).fit
    assert found is not None
    return found


def share(size: int) -> int:
    return -(-size // GPUS)


def test_states_are_shared_and_what_is_gathered_is_whole() -> None:
    one, four = fit_of(accumulation=2), fit_of(gpus=GPUS)
    for name in ("parameters", "optimizer_state", "gradients"):
        assert getattr(four, name) == share(getattr(one, name))
    model = llama_of(num_hidden_layers=8)
    whole = gathered(model, repeated_blocks(model))
    pieces = whole.rest + whole.rest_gradients + 2 * (whole.block + whole.block_gradients)
    step = one.predicted - one.parameters - one.optimizer_state - one.gradients
    held = four.parameters + four.optimizer_state + four.gradients
    assert four.predicted == held + pieces + step
    assert "one of 4 GPUs" in str(four) and "GPUs" not in str(one)


def test_a_budget_too_small_for_one_is_met_on_four() -> None:
    """The weights are most of this step, and each GPU holds two of eight blocks whole."""
    need, shared = fit_of(), fit_of(gpus=GPUS)
    assert shared.predicted < need.predicted
    with pytest.raises(BudgetError, match="FSDP over"):
        fit_of(fit=shared.predicted)
    assert fit_of(fit=shared.predicted, gpus=GPUS).predicted <= shared.predicted
    with pytest.raises(BudgetError, match="on each of 4 GPUs") as found:
        fit_of(fit="1KiB", gpus=GPUS)
    assert "gathered" in str(found.value) and "FSDP over" not in str(found.value)
    assert "a batch of 1" in str(found.value)


def test_another_number_of_gpus_is_planned_again() -> None:
    model = llama_of(num_hidden_layers=8)
    found = []
    for gpus in (1, GPUS):
        patch_model(model, "auto", example_inputs=BATCH, fit="1GiB", gpus=gpus)
        report = patch_report(model).fit
        assert report is not None
        found.append(report.predicted)
    assert found == [fit_of().predicted, fit_of(gpus=GPUS).predicted]


def test_what_cannot_be_counted_is_refused() -> None:
    for wrong in (0, 2.0, True):
        with pytest.raises(ConfigError, match="is no number of GPUs"):
            fit_of(gpus=wrong)
    model = llama_of(num_hidden_layers=2).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    planned = plan_model(model, load_config("auto"), BATCH)
    with pytest.raises(ConfigError, match="quantised weights are not counted on several GPUs"):
        fit_planned(model, planned, "1GiB", Training("adamw", quantised=True, gpus=2))


@pytest.mark.parametrize("asked", [{"gpus": 2}, {"accumulation": 4}, {"optimizer": "sgd"}])
def test_what_a_budget_alone_reads_is_refused_without_one(asked: dict[str, Any]) -> None:
    model = llama_of(num_hidden_layers=2)
    ((name, value),) = asked.items()
    with pytest.raises(ConfigError, match=rf"only a budget reads {name}={value!r}: give fit="):
        patch_model(model, "exact", example_inputs=BATCH, **asked)
