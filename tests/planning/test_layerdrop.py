"""Models that skip layers at random in training: what is said of them, and how all layers are patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

from lowmem_patch import patch_model, plan_patch
from lowmem_patch.errors import BudgetError
from tests.support.judge import assert_accurate
from tests.support.step import DOUBLE, FP32, step


def bart(layerdrop: float) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
        encoder_layerdrop=layerdrop, decoder_layerdrop=layerdrop, dropout=0.0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(5, 64, (2, 12))
    return BartForConditionalGeneration(config).train(), {"input_ids": ids, "labels": ids}


def test_a_budget_names_the_cause_and_blames_no_weights() -> None:
    model, inputs = bart(layerdrop=0.5)
    with pytest.raises(BudgetError, match=r"layerdrop.*DataDependent") as raised:
        plan_patch(model, "exact", example_inputs=inputs, fit="1MiB")
    assert "weights" not in str(raised.value)


def test_skipped_layers_are_left_alone_with_the_mend() -> None:
    model, inputs = bart(layerdrop=1.0)
    notes = plan_patch(model, "exact", example_inputs=inputs).notes
    (note,) = (note for note in notes if "did not run on the example inputs" in note)
    assert "layerdrop" in note
    others = plan_patch(bart(layerdrop=0.0)[0], "exact", example_inputs=inputs).notes
    assert not any("layerdrop" in note for note in others)


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_are_skipped_after_the_patch(seed: int) -> None:
    model, inputs = bart(layerdrop=0.0)
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
    for one in (model, patched):
        one.model.encoder.layerdrop = one.model.decoder.layerdrop = 0.5
    truth = step(copy.deepcopy(model).double(), inputs, DOUBLE, seed=seed)
    found, wanted = (step(one, inputs, FP32, seed=seed) for one in (patched, model))
    assert (
        found.gradients.keys() < dict(model.named_parameters()).keys()
    )  # some layers were skipped
    assert_accurate(found, wanted, truth)
