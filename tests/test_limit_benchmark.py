"""``benchmarks/limit.py`` on a CPU, with a tiny model: both variants are timed, and kernels have a kind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("limit")
    for name in ("limit", "whole"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_sums_are_timed_by_the_layers_and_by_autograd(
    limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "TURNS", 1)
    made = []
    serves = limit.SharedInput.serves
    monkeypatch.setattr(
        limit.SharedInput, "serves", staticmethod(lambda x: made.append(1) or serves(x))
    )
    trial = limit.Trial(layers=2, width=16, vocabulary=50, batch=1, length=4)
    rows = limit.measure("cpu", trial)
    assert [row["sums"] for row in rows] == ["by the layers", "by autograd"]
    assert all(0 < row["step_ms"] < 10_000 for row in rows)
    assert made
    del made[:]
    with limit.added_by_autograd(True):
        assert not limit.SharedInput.serves(None)
    assert not made


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_badd_coopA_NNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "attention"),
        ("_rotate_kernel", "rest"),
        ("void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>", "rest"),
    ],
)
def test_kernels_are_told_by_their_names(limit: Any, kernel: str, kind: str) -> None:
    assert limit.kind_of(kernel) == kind
