"""``benchmarks/architectures.py`` on a CPU: tiny batches of a text model, an image model and one of timm."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_patch.memory.step import run_step
from lowmem_patch.planning.report import RECORD

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # transformers', in DeBERTa


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("architectures")
    sys.modules.pop("architectures", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "autocast"),
    [("GPT-2", 8, False), ("CLIP", 224, False), ("ConvNeXt-T", 32, False), ("OLMo 2", 8, True)],
)
def test_both_variants_of_an_architecture_are_timed(
    benchmark_module: Any, name: str, length: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = benchmark_module.CASES[name]._replace(batch=1, length=length)
    if name == "OLMo 2":
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
        small = small._replace(sizes={**small.sizes, **sizes, "num_key_value_heads": 4})
    ran: list[bool] = []  # whether the model was patched, at each step

    def run(model: Any, inputs: Any) -> None:
        ran.append(RECORD in model.__dict__)
        run_step(model, inputs)
        assert not torch.is_autocast_enabled("cpu")
        dtypes = {parameter.dtype for parameter in model.parameters()}
        assert dtypes == {torch.float32 if autocast else torch.bfloat16}
        outputs = model(*inputs.args, **inputs.kwargs)
        if autocast:
            assert outputs.logits.dtype == torch.bfloat16

    monkeypatch.setattr(benchmark_module, "run_step", run)
    found = benchmark_module.measure(small, "cpu", 1, autocast=autocast)
    assert ran == [False, True] + [False] * 3 + [True] * 3  # one of each to warm up, then in turns
    assert list(found) == ["unpatched", "auto"]
    for times in found.values():
        assert list(times) == ["step_ms"]
        assert 0 < times["step_ms"] < 60_000


def test_every_architecture_can_be_built_without_data(benchmark_module: Any) -> None:
    for name, case in benchmark_module.CASES.items():
        model, inputs = benchmark_module.build(case._replace(batch=1), "meta", 1)
        assert model.training, name
        given = [*inputs.args, *inputs.kwargs.values()]
        assert given and all(value.is_meta for value in given), name
