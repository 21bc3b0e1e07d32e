"""The step tables satisfy their constraints and are the optimum that the docstring claims."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowmem_patch.constants import STEP_TABLES, StepTable
from lowmem_patch.reference import activate

# the distances reached, and those of the reference implementation's simulated annealing
OPTIMUM = {"gelu": 0.0095069, "gelu_tanh": 0.0095522, "silu": 0.0399413}
ANNEALED = {"gelu": 0.0095093, "silu": 0.0399438}


def distance(kind: str, table: StepTable) -> float:
    """Integral of (h - h~)^2 by the trapezoid rule."""
    x = torch.linspace(-60, 60, 1_200_001, dtype=torch.float64)
    difference = activate(x, kind)
    for threshold, slope in zip(table.thresholds, table.slopes, strict=True):
        difference = difference - slope * (x - threshold).clamp_min(0)
    return float(torch.trapezoid(difference.square(), x))


@pytest.mark.parametrize("kind", STEP_TABLES)
def test_tables_satisfy_both_constraints(kind: str) -> None:
    table = STEP_TABLES[kind]
    assert sum(table.slopes) == pytest.approx(1, abs=1e-15)
    products = (a * c for a, c in zip(table.slopes, table.thresholds, strict=True))
    assert sum(products) == pytest.approx(0, abs=1e-15)
    assert table.thresholds == tuple(sorted(table.thresholds))
    assert table.levels[0] == 0
    assert table.levels[3] == 1


@pytest.mark.parametrize("kind", OPTIMUM)
def test_tables_reach_the_claimed_distance(kind: str) -> None:
    reached = distance(kind, STEP_TABLES[kind])
    assert round(reached, 7) == OPTIMUM[kind]
    assert reached < ANNEALED.get(kind, 1)


@pytest.mark.parametrize("kind", OPTIMUM)
@pytest.mark.parametrize("step", [-1e-3, 1e-3])
def test_tables_are_a_minimum(kind: str, step: float) -> None:
    table = STEP_TABLES[kind]
    reached = distance(kind, table)
    outer, slope = table.thresholds[2], table.slopes[0]
    assert distance(kind, StepTable.symmetric(outer + step, slope)) > reached
    assert distance(kind, StepTable.symmetric(outer, slope + step)) > reached


def test_quick_gelu_scales_silu() -> None:
    scaled = distance("quick_gelu", STEP_TABLES["quick_gelu"])
    assert scaled == pytest.approx(OPTIMUM["silu"] / 1.702**3, rel=1e-5)


def test_table_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STEP_TABLES["gelu"].slopes = (0.0, 0.0, 0.0)  # type: ignore[misc]  # that is the test
