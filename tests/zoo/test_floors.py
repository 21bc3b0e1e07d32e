"""Floors of whole models: planned at their own sizes without data, and which are named on the page."""

from __future__ import annotations

import pytest

from zoo.floors import MOST, PLANNED, judge_floor, page
from zoo.result import PresetResult, Result


def planned(name: str, multiple: float) -> Result:
    auto = PresetResult(saved_before=4 << 20, saved_after=1 << 20)
    return Result(
        name,
        PLANNED,
        parameters=2_000_000,
        presets={"auto": auto},
        above_floor=multiple,
        reason="why",
    )


def test_models_above_the_limit_are_named_the_largest_first() -> None:
    multiples = {"a": MOST, "b": MOST + 0.001, "c": 1.5}
    results = [planned(name, value) for name, value in multiples.items()]
    others = [Result("d", "not planned", "why"), Result("e", "no head")]
    made = {"date": "2026-11-30", "machine": "x86_64", "torch": "2.11.0"}
    lines = page([*results, *others], made, missing=7)
    assert "`python -m zoo.floors` (float32, date 2026-11-30, torch 2.11.0)." in lines
    assert "1 of 3 model types save at most 1.02 times the floor." in lines
    assert "Not counted: 1 not planned, 7 without a result yet." in lines
    rows = ["| c | 2 M | 4.0 | 1.0 | 1.500 | why |", "| b | 2 M | 4.0 | 1.0 | 1.021 | why |"]
    assert lines[-2:] == rows


def test_a_model_is_planned_at_the_sizes_of_its_config() -> None:
    found = judge_floor("gpt2")
    assert found.status == PLANNED, found.reason
    assert found.parameters > 124_000_000 and found.inputs.endswith("labels 2x16")
    assert 1 <= found.above_floor <= MOST
    assert 0 < found.presets["auto"].saved_after < found.presets["auto"].saved_before


@pytest.mark.slow
def test_what_saves_most_above_the_floor_is_named() -> None:
    """Doge multiplies its residual stream with a weight that trains."""
    found = judge_floor("doge")
    assert found.above_floor > MOST
    assert found.reason.startswith("`mul` in `model.layers.*`: ")


def test_a_model_without_a_head_says_so() -> None:
    assert judge_floor("vit").status == "no head"
