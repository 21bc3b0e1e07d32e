"""The largest batch or length within a budget: it fits, and what is a little larger does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError
from lowmem_patch.memory import Training
from lowmem_patch.planning.budget import make_budget
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.largest import CLOSE, largest_fit
from lowmem_patch.planning.planner import plan_model
from lowmem_patch.tracing.inputs import ExampleInputs, as_example_inputs
from tests.support.models import llama_of

MIB = 2**20
LAYERS = 2
BOUND = 2**14


@pytest.fixture(autouse=True)
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are far smaller than cuBLAS's workspaces."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")


def llama() -> Any:
    with torch.device("meta"):
        return llama_of(num_hidden_layers=LAYERS, max_position_embeddings=BOUND).train()


def inputs_of(batch: int, length: int) -> ExampleInputs:
    ids = torch.empty(batch, length, dtype=torch.long, device="meta")
    return as_example_inputs({"input_ids": ids, "labels": ids})


def levels_of(model: nn.Module, inputs: ExampleInputs, budget: int, host: int) -> dict[str, int]:
    """Counts of the levels with which a step fits.

    Raises:
        BudgetError: it does not.
    """
    planned = plan_model(model, load_config("auto"), inputs)
    fit = fit_planned(model, planned, budget, Training(), host=host).report.fit
    assert fit is not None and fit.predicted <= budget
    return fit.levels


def levels_where_largest(
    model: nn.Module, make: Callable[[int], ExampleInputs], size: int, budget: int, host: int
) -> dict[str, int]:
    """Levels with which the size fits; one that is a little larger does not."""
    with pytest.raises(BudgetError):
        levels_of(model, make(int((1 + 2 * CLOSE) * size) + 1), budget, host)
    return levels_of(model, make(size), budget, host)


@pytest.mark.parametrize(
    ("of", "host"),
    [pytest.param("batch", MIB // 8, marks=pytest.mark.slow), ("length", 2**40)],
    ids=["a little host", "any host"],
)
def test_the_largest_size_fits_and_no_larger_one(of: str, host: int) -> None:
    model, budget = llama(), 3 * MIB

    def make(size: int) -> ExampleInputs:
        return inputs_of(size, 64) if of == "batch" else inputs_of(2, size)

    size = largest_fit(
        model,
        load_config("auto"),
        make,
        make_budget(budget, model),
        Training(),
        start=8,
        bound=BOUND,
        host=host,
    )
    assert size > 8
    assert set(levels_where_largest(model, make, size, budget, host)) != {"patched"}


@pytest.mark.slow
def test_no_size_is_above_the_bound_and_none_is_said_where_one_does_not_fit() -> None:
    model, config = llama(), load_config("auto")

    def largest(budget: int, bound: int = 100) -> int:
        return largest_fit(
            model, config, lambda size: inputs_of(1, size), make_budget(budget, model), Training(), start=64,
            bound=bound, host=0,
        )  # fmt: skip

    assert largest(2**30) == 100
    assert largest(1000) == 0
    with pytest.raises(BudgetError):
        levels_of(model, inputs_of(1, 1), 1000, 0)


def test_a_model_without_blocks_has_a_largest_batch_as_patched() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def make(size: int) -> ExampleInputs:
        return as_example_inputs((torch.randn(size, 64),))

    size = largest_fit(
        model,
        load_config("auto"),
        make,
        make_budget(MIB, model),
        Training(),
        start=2,
        bound=BOUND,
        host=2**40,
    )
    assert levels_where_largest(model, make, size, MIB, 2**40) == {}
