"""head: losses of logits that are computed where they are read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Qwen2Config,
    T5Config,
)

from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.functional import head as chunks
from tests.support.heads import (
    CLASSES,
    FUSED,
    HEAD,
    IDS,
    READ,
    llama,
    run,
    truth,
    whole_reads,
)
from tests.support.judge import assert_accurate
from tests.support.models import randomise
from tests.support.step import MODES, cast


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ROWS", 16)


@pytest.mark.parametrize("name", FUSED)
def test_a_loss_is_torchs_and_never_reads_logits_whole(name: str) -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED[name]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 0
    with saved_bytes(model) as before:
        keep = loss(model)
    with saved_bytes(patched) as after:
        keep = loss(patched)
    del keep
    logits = IDS.numel() * CLASSES * 4
    assert after.activations <= before.activations - logits * 0.7


@pytest.mark.parametrize("name", READ)
def test_who_else_reads_logits_gets_them(name: str) -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = READ[name]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 1


@pytest.mark.parametrize("mode", ["bf16", "autocast"])
@pytest.mark.parametrize(
    "name", ["the model's own", "a user's own", "none", "log_softmax, gather", "soft cap"]
)
def test_in_low_precision(name: str, mode: str) -> None:
    model = cast(llama(), MODES[mode].weights)
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED[name]
    found, own = (run(m, loss, MODES[mode]) for m in (patched, model))
    assert found.output.dtype == own.output.dtype
    assert_accurate(found, own, truth(model, loss), MODES[mode])
    assert whole_reads(patched) == 0


TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TINY |= {"num_hidden_layers": 2, "vocab_size": CLASSES, "pad_token_id": 0, "bos_token_id": 1}
TINY |= {"eos_token_id": 2}
WIDTHS: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": CLASSES,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2, tied": (AutoModelForCausalLM, Qwen2Config(**TINY, num_key_value_heads=2)),
    "gemma2, soft cap": (AutoModelForCausalLM, Gemma2Config(**TINY, num_key_value_heads=2, head_dim=8)),
    "granite, divided": (
        AutoModelForCausalLM, GraniteConfig(**TINY, num_key_value_heads=2, logits_scaling=3.0)
    ),
    "cohere, scaled": (AutoModelForCausalLM, CohereConfig(**TINY, num_key_value_heads=2)),
    "gpt2": (AutoModelForCausalLM, GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=CLASSES,
        bos_token_id=1, eos_token_id=2, loss_type="ForCausalLMLoss")),
    "bert, masked": (AutoModelForMaskedLM, BertConfig(**TINY)),
    "t5": (AutoModelForSeq2SeqLM, T5Config(d_model=32, d_ff=64, num_heads=4, d_kv=8, num_layers=2,
        vocab_size=CLASSES, decoder_start_token_id=0)),
    "bart, a bias added": (AutoModelForSeq2SeqLM, BartConfig(**WIDTHS)),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architectures_own_loss(name: str) -> None:
    make, config = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = randomise(make.from_config(config)).eval()  # without dropouts
    patched = patch_model(copy.deepcopy(model), "exact")
    labels = IDS if "masked" not in name else torch.where(IDS < 40, IDS, -100)

    def loss(m: Any) -> Tensor:
        value: Tensor = m(input_ids=IDS, labels=labels).loss
        return value

    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 0
