"""``benchmarks/architectures.py`` on a CPU: tiny batches of a text model, an image model and one of timm."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # transformers', in DeBERTa


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("architectures")
    sys.modules.pop("architectures", None)


@pytest.mark.parametrize("name", ["GPT-2", "CLIP", "ConvNeXt-T"])
def test_both_variants_of_an_architecture_are_timed(benchmark_module: Any, name: str) -> None:
    case = benchmark_module.CASES[name]
    small = case._replace(batch=1, length=8 if name == "GPT-2" else case.length)
    found = benchmark_module.measure(small, "cpu", 1)
    assert list(found) == ["unpatched", "auto"]
    for times in found.values():
        assert list(times) == ["step_ms"]
        assert 0 < times["step_ms"] < 60_000


def test_every_architecture_can_be_built_without_data(benchmark_module: Any) -> None:
    for name, case in benchmark_module.CASES.items():
        model, inputs = benchmark_module.build(case._replace(batch=1), "meta", 1)
        assert model.training, name
        given = inputs.values() if isinstance(inputs, dict) else inputs
        assert all(value.is_meta for value in given), name
