"""An attention module that runs its rotary embedding as one op, and gates its output by a function."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AfmoeConfig, AfmoeModel

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.judge import assert_same_step
from tests.support.step import BF16


@pytest.fixture
def gated() -> AfmoeModel:
    """Its attention ends with ``output * torch.sigmoid(gate)``."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {
        "num_hidden_layers": 2,
        "num_dense_layers": 2,
        "layer_types": ["sliding_attention"] * 2,
    }
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "pad_token_id": 0}
    return AfmoeModel(AfmoeConfig(**heads, **layers, **sizes)).to(torch.bfloat16).train()


def test_gate_beside_a_rotary_embedding_is_recomputed(gated: AfmoeModel) -> None:
    twin, inputs = copy.deepcopy(gated), {"input_ids": torch.arange(3, 43)[None]}
    stock = type(gated).forward, gated.layers[0].self_attn.forward.__func__
    patch_model(gated, "exact", example_inputs=inputs)
    report = patch_report(gated)
    with saved_bytes(gated) as saved:
        gated(**inputs)
    assert saved.activations == report.saved_after <= 1.1 * report.floor
    savers = {s.function for t in saved.storages for s in t.savers if "self_attn" in s.module}
    assert "sigmoid" not in savers and any("rotary" in name for name in savers)
    assert_same_step(gated, twin, inputs, BF16)
    unpatch_model(gated)
    assert (type(gated).forward, gated.layers[0].self_attn.forward.__func__) == stock
