"""``inspect`` says what its numbers depend on, and takes it from its options."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from lowmem_patch.cli import app

LAYERS = 2


@functools.cache
def printed(*arguments: str | Path) -> str:
    """What a look at a model shows; tests that ask for the same are given the same."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def data_of(*arguments: str | Path) -> Any:
    return json.loads(printed(*arguments, "--json"))


def moments(*arguments: str | Path) -> dict[str, int]:
    found: dict[str, int] = data_of(*arguments)["memory"]["after"]["moments"]
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_head_names_every_assumption(llama: Path) -> None:
    shown = printed(llama, "--train", "lora:q_proj,v_proj", "--lora-rank", "4")
    for line in (
        "inputs: input_ids 2x128 (--batch-size)",
        "length: 128 tokens (the model's, at most 4096; --seq-len)",
        "attention: sdpa",
        "adapters: LoRA, rank 4 (--lora-rank), on q_proj, v_proj",
        "optimizer: torch's AdamW, fused",
        "accumulation: none",
        "loss: the model's own",
        "checkpointing: none",
    ):
        assert f"  {line}" in shown
    assert "one step, batch 2 x 128 tokens" in shown
    assumed = data_of(llama, "--seq-len", "16", "--dtype", "bfloat16")["assumptions"]
    assert assumed["length"] == "16 tokens (--seq-len)" and assumed["parameters"] == "bfloat16"
    assert "adapters" not in assumed and "gpus" not in assumed


def test_dropout_is_counted_as_on_a_gpu(llama: Path, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    assert data_of(tmp_path, "--seq-len", "8")["assumptions"]["dropout"].startswith(
        "as a GPU saves"
    )
    assert "dropout" not in data_of(llama, "--seq-len", "16")["assumptions"]


def test_a_length_beyond_the_positions_is_said(llama: Path) -> None:
    assumed = data_of(llama, "--seq-len", "160")["assumptions"]
    assert assumed["length"] == "160 tokens (--seq-len; the model's positions reach 128)"


def test_a_long_model_is_taken_at_4096_tokens(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    assert data_of(tmp_path)["memory"]["length"] == 4096


def test_a_config_without_cache_counts_no_masks(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_cache": False}))
    assert moments(tmp_path) == moments(llama)
    assert data_of(tmp_path)["saved_before"] == data_of(llama)["saved_before"]


def test_accumulation_holds_gradients_in_the_forward(llama: Path) -> None:
    data = data_of(llama, "--accumulation", "4")["memory"]["after"]
    once = moments(llama)
    for moment in ("forward", "loss", "after the loss"):
        assert data["moments"][moment] == once[moment] + data["gradients"]
    assert data["moments"]["optimizer step"] == once["optimizer step"]


@pytest.mark.slow
def test_checkpointing_keeps_a_block_at_a_time(llama: Path) -> None:
    plain, checkpointed = moments(llama), moments(llama, "--checkpointing")
    hidden = 2 * 128 * 32 * 4
    saved = data_of(llama)["saved_after"]
    # each block keeps its input; behind them are the norm and the loss
    kept = (LAYERS + 3) * hidden
    assert checkpointed["after the loss"] < plain["after the loss"] - saved + kept
    assert checkpointed["backward"] < plain["backward"]
    assert "saved activations, without checkpointing" in printed(llama, "--checkpointing")


def test_gpus_share_the_states(llama: Path) -> None:
    one, four = (data_of(llama, "--gpus", n)["memory"]["after"] for n in ("1", "4"))
    for states in ("parameters", "gradients", "optimizer"):
        assert four[states] == -(-one[states] // 4)
    assert "gpus: 4" in printed(llama, "--gpus", "4")
    result = CliRunner().invoke(app, ["inspect", str(llama), "--train", "qlora", "--gpus", "2"])
    assert result.exit_code == 2 and "several GPUs" in result.stderr
