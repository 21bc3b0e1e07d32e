"""Reports of models without a cache of keys and values: no mask is counted, and no repeated heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.heads import llama

IDS = torch.arange(2 * 48).view(2, 48) % 64


@pytest.mark.parametrize("config", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("given", [{}, {"use_cache": False}], ids=["config", "argument"])
def test_a_report_counts_what_a_run_saves(config: bool, given: dict[str, Any]) -> None:
    model = llama()
    model.config.use_cache = config
    batch = {"input_ids": IDS, **given}
    with saved_bytes(model) as before:
        model(**batch)
    report = patch_report(patch_model(model, "exact", example_inputs=batch))
    model(**batch)  # angles that are made once
    with saved_bytes(model) as after:
        model(**batch)
    assert (report.saved_before, report.saved_after) == (before.activations, after.activations)


def qwen3_5() -> nn.Module:
    """Three layers with a recurrent state, one with keys and values."""
    return of_type(
        "qwen3_5_text", num_hidden_layers=4, intermediate_size=48, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=2,
    )  # fmt: skip


def xlstm() -> nn.Module:
    """Its cache is of a class of its own."""
    return of_type("xlstm", num_hidden_layers=1, num_blocks=1, num_heads=2, chunk_size=8)


def of_type(model_type: str, **settings: Any) -> nn.Module:
    config = AutoConfig.for_model(model_type, vocab_size=64, hidden_size=32, **settings)
    return AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [qwen3_5, xlstm])
def test_recurrent_layers_find_no_state_in_a_trace(build: Callable[[], nn.Module]) -> None:
    model = build()
    batch = {"input_ids": IDS[:, :8].clone(), "use_cache": False}
    report = patch_report(patch_model(model, "exact", example_inputs=batch))
    assert not any("traced with data" in note for note in report.notes)
    with saved_bytes(model) as after:
        model(**batch)
    assert report.saved_after == after.activations
