"""Models that skip layers at random in training: all layers are patched, or it is said which are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

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


def wav2vec2(layerdrop: float) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=16,
        conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=layerdrop,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
    )  # fmt: skip
    labels = torch.randint(1, 16, (2, 5))
    labels[1, 3:] = -100
    inputs = {"input_values": torch.randn(2, 6400), "labels": labels}
    return Wav2Vec2ForCTC(config).train(), inputs


MODELS = {"bart": bart, "wav2vec2 with ctc": wav2vec2}


@pytest.mark.parametrize("layerdrop", [0.5, 0.99])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_training_skips_at_random_are_all_planned(name: str, layerdrop: float) -> None:
    make = MODELS[name]
    _, inputs = make(layerdrop=0.0)
    whole, dropped = (
        plan_patch(make(layerdrop=one)[0], "exact", example_inputs=inputs, fit="1GiB")
        for one in (0.0, layerdrop)
    )
    assert dropped.sites == whole.sites
    assert dropped.notes == whole.notes
    assert dropped.saved_after == whole.saved_after
    assert str(dropped.fit) == str(whole.fit)


def test_layers_that_are_always_skipped_are_left_alone() -> None:
    model, inputs = bart(layerdrop=1.0)
    notes = plan_patch(model, "exact", example_inputs=inputs).notes
    (note,) = (note for note in notes if "did not run on the example inputs" in note)
    assert "encoder.layers.0" in note


def test_layers_that_a_run_on_data_skipped_are_left_alone_with_the_mend() -> None:
    model, inputs = bart(layerdrop=0.999)

    def look_at_values(module: Any, args: Any) -> None:
        assert float(args[0].sum()) < torch.inf

    model.model.encoder.layernorm_embedding.register_forward_pre_hook(look_at_values)
    report = plan_patch(model, "exact", example_inputs=inputs)
    (note,) = (note for note in report.notes if "did not run on the example inputs" in note)
    assert "layerdrop" in note
    with pytest.raises(BudgetError, match=r"layerdrop.*DataDependent") as raised:
        plan_patch(model, "exact", example_inputs=inputs, fit="1MiB")
    assert "weights" not in str(raised.value)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_a_step_skips(name: str, seed: int) -> None:
    preset = ("exact", "auto")[seed % 2]
    model, inputs = MODELS[name](layerdrop=0.5)
    patched = patch_model(copy.deepcopy(model), preset, example_inputs=inputs)
    truth = step(copy.deepcopy(model).double(), inputs, DOUBLE, seed=seed)
    found, wanted = (step(one, inputs, FP32, seed=seed) for one in (patched, model))
    assert (
        found.gradients.keys() < dict(model.named_parameters()).keys()
    )  # some layers were skipped
    assert_accurate(found, wanted, truth)
