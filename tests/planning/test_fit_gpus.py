"""A budget of each of several GPUs, over which FSDP2 will shard the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch import BudgetError, ConfigError, patch_model, patch_report, plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.memory import Training
from lowmem_patch.memory.model_states import model_state_bytes
from lowmem_patch.memory.sharding import Gathered, Sharding, gathered, is_replicated
from lowmem_patch.memory.step import (
    AFTER_BACKWARD,
    AFTER_LOSS,
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
)
from lowmem_patch.memory.timeline import RunBytes, Timeline
from lowmem_patch.planning.budget import Budget
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.planner import plan_model
from lowmem_patch.planning.suggestions import Base, Suggestion, _sharded
from tests.support.fitted import planned_once
from tests.support.models import llama_of

BATCH = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
GPUS = 4


@pytest.fixture(autouse=True, scope="module")
def each_model_once() -> Iterator[None]:
    """All models of one size are equal here, and are planned once for all budgets."""
    with planned_once():
        yield


def fit_of(fit: str | int = "1GiB", **settings: Any) -> FitReport:
    model = llama_of(num_hidden_layers=8)
    found = plan_patch(model, "auto", example_inputs=BATCH, fit=fit, **settings).fit
    assert found is not None
    return found


def share(size: int) -> int:
    return -(-size // GPUS)


def test_one_gpu_holds_shards_and_what_is_gathered() -> None:
    whole = Gathered(rest=100, rest_gradients=40, block=10, block_gradients=6)
    run = RunBytes(own=1, output=1, output_lives=True, lasting=2, kept=2)
    parts = {
        (FORWARD, 0): 3, (FORWARD, 1): 5, (FORWARD, 2): 6, (FORWARD, 3): 5, (FORWARD, 4): 4, (LOSS, 4): 7,
        (AFTER_LOSS, 0): 5, (BACKWARD, 4): 8, (BACKWARD, 3): 50, (BACKWARD, 1): 50, (AFTER_BACKWARD, 0): 52,
    }  # fmt: skip
    timeline = Timeline((run, run), parts, outside=0, held=4)
    one = Sharding(2, whole, (6, 6), accumulates=False).of_one(timeline)
    assert one.parts == {
        # in front of the first block the buffers of the rest are not free yet, and one block is on its way
        (FORWARD, 0): 3 + 220, (FORWARD, 1): 5 + 120, (FORWARD, 2): 6 + 130, (FORWARD, 3): 5 + 120,
        # head and loss, and the last block on its way
        (FORWARD, 4): 4 + 110, (LOSS, 4): 7 + 110, (AFTER_LOSS, 0): 5 + 110, (BACKWARD, 4): 8 + 110,
        # the last block's gradients lie on two GPUs, and once more in the buffer that is reduced
        (BACKWARD, 3): 50 + 120, (BACKWARD, 1): 50 - 3 + 120 + 6, (BACKWARD, 0): 52 - 6 + 110,
        (AFTER_BACKWARD, 0): 26,
    }  # fmt: skip
    kept = Sharding(2, whole, (6, 6), accumulates=True).of_one(timeline).parts
    assert (kept[BACKWARD, 1], kept[BACKWARD, 0]) == (50 + 120 + 6 + 40, 52 + 110 + 40)
    assert kept[AFTER_BACKWARD, 0] == 52
    # without repeated blocks the model is one group, whose buffer is there until the forward ends
    bare = Gathered(rest=100, rest_gradients=40, block=0, block_gradients=0)
    found = Sharding(2, bare, (0, 0), accumulates=False).of_one(timeline)
    assert {part: size - parts.get(part, 0) for part, size in found.parts.items()} == {
        **{part: 200 for part in parts if part[0] in (FORWARD, LOSS)},
        **dict.fromkeys([(AFTER_LOSS, 0), (BACKWARD, 4), (BACKWARD, 3), (BACKWARD, 1)], 100),
        (BACKWARD, 0): 52 + 100, (AFTER_BACKWARD, 0): -20,
    }  # fmt: skip
    parts = {
        (FORWARD, 0): 7, (LOSS, 0): 6, (AFTER_LOSS, 0): 5, (BACKWARD, 0): 8, (AFTER_BACKWARD, 0): 4,
    }  # fmt: skip
    found = Sharding(2, bare, (), accumulates=False).of_one(Timeline((), parts, 0, 0))
    assert found.moments() == {
        FORWARD: 7 + 200, LOSS: 6 + 200, AFTER_LOSS: 5 + 100, BACKWARD: 8 + 100,
        AFTER_BACKWARD: 2, OPTIMIZER: 2,
    }  # fmt: skip


class Counted(nn.Module):
    """Six blocks of 4 x 4 weights, 64 bytes each, and a head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        self.head = nn.Linear(4, classes, bias=False)


def suggestion_of(
    model: nn.Module, activations: int, budget: int, buckets: int = 0
) -> Suggestion | None:
    states = model_state_bytes(model, "adamw")
    states = dataclasses.replace(states, workspaces=(32,), buckets=buckets)
    steps: Any = SimpleNamespace(
        states=states, resident=states.resident, earlier=0, seconds=(), training=Training()
    )
    peak = activations + states.gradients
    return _sharded(Base(steps, model, Budget(budget, ""), peak, 0.0))


def test_the_sum_of_a_step_over_several_gpus() -> None:
    """All shards of the states count, whole workspaces, and what is gathered where that is most."""
    model = Counted(5)
    weights, head, block = 464, 80, 64
    backward = 1000 + 2 * (head + 2 * block)  # weights that are gathered, and gradients as many
    for gpus in (2, 4, 8):
        total = backward + 4 * weights // gpus + 32
        found = suggestion_of(model, 1000, total)
        assert found is not None and found.total == total and found.on_top
        assert found.name == f"FSDP over {gpus} GPUs, bytes of each"
    assert suggestion_of(model, 1000, backward + 4 * weights // 64 + 32 - 1) is None


def test_several_gpus_under_fsdp_have_no_buckets_of_ddp() -> None:
    model = Counted(5)
    alone, replicated = (suggestion_of(model, 1000, 10_000, buckets) for buckets in (0, 464))
    assert alone is not None and replicated is not None and replicated.total == alone.total


def test_the_sum_of_several_gpus_may_be_that_in_front_of_the_blocks() -> None:
    model = Counted(50)
    model.head.requires_grad_(False)
    blocks, head, block = 6 * 64, 800, 64
    first = 2 * (head + block)
    assert first > 200 + head + 4 * block  # the backward
    total = first + (4 * blocks + head) // 2 + 32
    found = suggestion_of(model, 200, total)
    assert found is not None and found.total == total


def test_processes_of_torch_distributed_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_replicated()
    for there, begun, world in (
        (True, True, 2),
        (True, True, 1),
        (True, False, 2),
        (False, True, 2),
    ):
        monkeypatch.setattr(torch.distributed, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda begun=begun: begun)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda world=world: world)
        assert is_replicated() is (there and begun and world > 1)


@pytest.mark.slow
def test_states_are_shared_and_the_peak_is_of_one_gpu() -> None:
    one, four = fit_of(), fit_of(gpus=GPUS)
    for name in ("parameters", "optimizer_state", "gradients"):
        assert getattr(four, name) == share(getattr(one, name))
    less = sum(
        getattr(one, name) - getattr(four, name) for name in ("parameters", "optimizer_state")
    )
    model = llama_of(num_hidden_layers=8)
    whole = gathered(model)
    whole_there = one.predicted - less + whole.computing + whole.computing // 200
    # the first block of the backward; behind it a block's gradients wait to be reduced
    assert one.moment == "the backward of model.layers.7"
    assert whole_there < four.predicted < whole_there + whole.block_gradients
    assert four.moment == "the backward of model.layers.6"
    assert "one of 4 GPUs" in str(four) and "GPUs" not in str(one)


@pytest.mark.slow
def test_the_buffers_of_the_rest_are_the_least_budget() -> None:
    """With a large vocabulary the step's peak is before its first block, whatever runs again."""
    model = llama_of(num_hidden_layers=6, vocab_size=4096, tie_word_embeddings=False)
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    with pytest.raises(BudgetError) as found:
        plan_patch(model, "auto", example_inputs=BATCH, fit="1KiB", gpus=2)
    whole = gathered(model)
    least = plan_patch(model, "auto", example_inputs=BATCH, fit=found.value.least, gpus=2).fit
    assert least is not None and least.moment == "the forward before the blocks"
    assert least.predicted > least.parameters + least.optimizer_state + 2 * whole.rest


@pytest.mark.slow
def test_buckets_of_ddp_are_a_copy_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = fit_of()
    monkeypatch.setattr("lowmem_patch.memory.sharding.is_replicated", lambda: True)
    replicated = fit_of()
    assert replicated.predicted == alone.predicted + alone.gradients
    assert "DDP's buckets" in str(replicated) and "DDP" not in str(alone)
    assert fit_of(gpus=GPUS).notes[-1].startswith("bytes are those of one of 4 GPUs")
    with pytest.raises(BudgetError, match="DDP's buckets"):
        fit_of(fit="1KiB")


@pytest.mark.slow
def test_a_budget_too_small_for_one_is_met_on_four() -> None:
    """The weights are most of this step, and each GPU holds two of eight blocks whole."""
    need, shared = fit_of(), fit_of(gpus=GPUS)
    assert shared.predicted < need.predicted
    with pytest.raises(BudgetError, match="FSDP over"):
        fit_of(fit=shared.predicted)
    assert fit_of(fit=shared.predicted, gpus=GPUS).predicted <= shared.predicted
    with pytest.raises(BudgetError, match="on each of 4 GPUs") as found:
        fit_of(fit="1KiB", gpus=GPUS)
    assert "what FSDP2 gathers" in str(found.value) and "FSDP over" not in str(found.value)
    found_of_four = found.value.least
    with pytest.raises(BudgetError, match=r"FSDP over 8 GPUs, bytes of each: [^,]*, fits"):
        fit_of(fit=found_of_four - 1, gpus=GPUS)
    assert fit_of(fit=found_of_four - 1, gpus=8).predicted < found_of_four
    longer = {"input_ids": torch.zeros(2, 256, dtype=torch.long)}
    with pytest.raises(BudgetError, match="a batch of 1"):
        plan_patch(
            llama_of(num_hidden_layers=8), "auto", example_inputs=longer, fit="1KiB", gpus=GPUS
        )


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
