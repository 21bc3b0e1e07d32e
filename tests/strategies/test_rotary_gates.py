"""An attention module that runs its rotary embedding as one op, beside other patches and under modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AfmoeConfig, AfmoeModel

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.judge import assert_same_step
from tests.support.step import BF16

TOKENS = {"input_ids": torch.arange(3, 43)[None]}


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
    twin, inputs = copy.deepcopy(gated), TOKENS
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


class CountingMode(TorchFunctionMode):
    """Counts the torch functions, looks at attributes among them, that each costs it a call of Python."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_patched_attention_calls_a_mode_less_often(gated: AfmoeModel) -> None:
    calls = []
    for model in (copy.deepcopy(gated), patch_model(gated, "exact", example_inputs=TOKENS)):
        mode = CountingMode()
        attention = model.layers[0].self_attn
        attention.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
        attention.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None))
        model(**TOKENS)
        calls.append(mode.calls)
    assert 0 < calls[1] < calls[0]
