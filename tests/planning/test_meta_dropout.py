"""A model on the meta device is planned for a GPU, where a dropout keeps a bool for each element."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from lowmem_patch import PatchReport, plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.memory import Training, predict_memory
from lowmem_patch.tracing.inputs import ExampleInputs

BATCH, LENGTH, HIDDEN, LAYERS = 2, 24, 32, 2


def bert(hidden: float = 0.0, attention: float = 0.0, device: str = "meta") -> nn.Module:
    config = BertConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        vocab_size=50, hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        return BertModel(config, add_pooling_layer=False)


def inputs(batch: int = BATCH, length: int | None = LENGTH, device: str = "meta") -> ExampleInputs:
    return ExampleInputs(
        (), {"input_ids": torch.zeros(batch, length or 1, dtype=torch.long, device=device)}
    )


def planned(model: nn.Module, device: str = "meta") -> PatchReport:
    return plan_patch(model, "exact", example_inputs=inputs(device=device))


def test_a_dropout_keeps_a_byte_for_each_element() -> None:
    masks = (
        (1 + 2 * LAYERS) * BATCH * LENGTH * HIDDEN
    )  # embeddings, attention's output, MLP's output
    without, with_dropout = planned(bert()), planned(bert(hidden=0.1))
    assert with_dropout.saved_before - without.saved_before == masks
    # a CPU keeps a float32 there, which a real model's plan counts
    on_cpu = planned(bert(hidden=0.1, device="cpu"), "cpu")
    assert on_cpu.saved_before - without.saved_before == 4 * masks


def test_fused_attention_keeps_no_mask() -> None:
    without, with_dropout = planned(bert()), planned(bert(attention=0.1))
    assert with_dropout.saved_before == without.saved_before
    assert with_dropout.saved_after == without.saved_after
    assert planned(bert(attention=0.1, device="cpu"), "cpu").saved_before > without.saved_before


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, "exact"])
def test_the_predicted_peak_agrees(preset: str | None) -> None:
    def peak(model: nn.Module) -> int:
        found = predict_memory(
            model, load_config(preset or "exact"), lambda batch, length: inputs(batch, length),
            batch_size=BATCH, length=LENGTH, training=Training("sgd"),
        )  # fmt: skip
        side = found.before if preset is None else found.after
        return side.total

    assert peak(bert(attention=0.1)) == peak(bert())
    assert peak(bert()) < peak(bert(hidden=0.1))


def test_attention_with_dropout_runs_again_as_on_a_gpu() -> None:
    """What blocks save in the backward is what they saved in the forward: fused attention, and no mask."""

    def peak(attention: float) -> int:
        found = predict_memory(
            bert(attention=attention), load_config("exact"), inputs, batch_size=BATCH, length=LENGTH,
            training=Training(checkpointing=True),
        )  # fmt: skip
        return found.before.total

    assert peak(0.1) == peak(0.0)
