"""The times that bench takes, and what it says of steps that wait for Python."""

from __future__ import annotations

import pytest
import torch

from lowmem_patch.bench import Comparison, Row, compare, unpatched
from lowmem_patch.report.bench import print_bench
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support.models import llama


def test_medians_and_quartiles() -> None:
    row = Row("x", 2**20, 3 * 2**20, 2**22, (5.0, 1.0, 2.0, 3.0, 4.0))
    assert row.quartiles == (2.0, 3.0, 4.0)
    assert row.to_dict(6) == {
        "act_mib": 1.0, "peak_mib": 3.0, "reserved_mib": 4.0, "step_ms": 3.0, "step_spread_ms": 2.0,
        "kernels_ms": None, "per_second": 2000.0,
    }  # fmt: skip
    assert Row("x", times=(7.0,)).quartiles == (7.0, 7.0, 7.0)


def test_a_step_that_waits_for_python_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        Row("stock", 2**20, 2**21, 2**22, (10.0,), kernels=9.5),
        Row("auto", 2**20, 2**21, 2**22, (15.0,), kernels=6.0),
        Row("broken", failed="why"),
    )
    print_bench(Comparison(rows, "cuda:0", 8, "images", 1, 1, False), "a model")
    said = " ".join(capsys.readouterr().out.split())
    assert "kernels" in said and "(auto 40%)" in said and "A larger batch" in said
    assert [row.busy for row in rows[:2]] == [0.95, 0.4]
    print_bench(Comparison(rows[:1], "cuda:0", 8, "images", 1, 1, False), "a model")
    assert "waits for Python" not in capsys.readouterr().out


@pytest.mark.gpu
def test_kernels_of_a_step_are_timed_on_a_gpu() -> None:
    step = ExampleInputs((), {"input_ids": torch.randint(3, 20, (2, 16), device="cuda")})
    (row,) = compare(llama(), step, {"unpatched": unpatched}, rounds=1, steps=3).rows
    assert row.failed is None and row.kernels is not None
    assert 0 < row.kernels < 2 * row.quartiles[1]
