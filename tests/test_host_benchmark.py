"""``benchmarks/host.py`` on a CPU, with a tiny model: both variants are timed, in forward and backward."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

ROOT = Path(__file__).parent.parent


def test_both_variants_of_a_model_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    host = importlib.import_module("host")
    try:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        config = Qwen2Config(hidden_size=16, intermediate_size=32, vocab_size=50, **heads)
        ids = torch.randint(3, 50, (1, 4))
        found = host.measure((Qwen2Model(config), {"input_ids": ids}, False), "cpu", turns=1)
    finally:
        sys.modules.pop("host", None)
    assert list(found) == ["unpatched", "exact"]
    for times in found.values():
        assert list(times) == ["forward_ms", "backward_ms"]
        assert all(0 < value < 10_000 for value in times.values())
