"""The fixed spread of architectures that every run judges; ``make zoo`` judges all of them.

Each is here for a dataflow that the others lack, and the families of `tests/strategies/test_families.py` as
well: LLaMA, BERT, T5, ViT, Swin.
"""

from __future__ import annotations

import warnings

import pytest
import timm

from tests.support.tiers import slow_but
from zoo.result import Result
from zoo.run import judge_timm, judge_transformers

TRANSFORMERS = {
    "gemma2": "1 + weight, sandwich norms",
    "gpt2": "transposed weights",
    "nemotron": "LayerNorm with 1 + weight",
    "ibert": "replaces its own buffers in the forward",
    "gpt_neox": "attention and MLP in parallel, two norms",
    "falcon": "attention and MLP behind one norm",
    "olmo2": "norms behind the blocks, norms of queries and keys",
    "deepseek_v3": "low-rank attention with norms inside, routed experts",
    "mixtral": "3-D expert weights",
    "gpt_oss": "clamped interleaved experts",
    "mamba2": "gated norm of two inputs",
    "albert": "one block for every layer",
    "modernbert": "packed gate and up",
    "bart": "post-norm encoder-decoder",
    "whisper": "spectrograms, cross-attention",
    "wav2vec2": "raw audio, GroupNorm among LayerNorms",
    "swinv2": "norms behind the blocks, functional Linears",
    "convnext": "norms over channels, which are not last",
    "segformer": "strided attention behind reshapes",
    "clip": "two towers, QuickGELU",
    "llava": "text alone of a multimodal model",
    "big_bird": "replaces its own modules in the forward",
}

TIMM = {
    "test_convnext": "LayerNorm over channels as a module",
    "eva02_tiny_patch14_224": "SwiGLU, norms inside the attention",
    "xcit_nano_12_p16_224": "attention over channels",
    "gmlp_ti16_224": "gating by tokens",
    "test_mambaout": "gated convolutions",
}


# `exact` does what `auto` does, but for codes, which `paper` takes wherever it can; the zoo judges all three
PRESETS = ("paper", "auto")


def passes(result: Result) -> None:
    assert result.status == "judged", result.reason
    assert not result.wrong, result.wrong
    assert result.sites
    assert any(set(preset.strategies) - {"keep"} for preset in result.presets.values())
    paper = result.presets["paper"]
    assert "reload" in paper.errors or "fold" not in paper.strategies
    assert "fold" not in result.presets["auto"].strategies


@pytest.mark.parametrize(
    "model_type",
    slow_but(
        TRANSFORMERS, "gemma2", "gpt2", "nemotron", "falcon", "mixtral", "mamba2", "albert", "clip"
    ),
)
def test_transformers_models_are_right(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of foreign code
        passes(judge_transformers(model_type, PRESETS))


@pytest.mark.parametrize("variant", slow_but(TIMM, "test_convnext", "eva02_tiny_patch14_224"))
def test_timm_models_are_right(variant: str) -> None:
    if not timm.is_model(variant):
        pytest.skip(f"timm {timm.__version__} has no {variant}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        passes(judge_timm(variant, PRESETS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "status", "reason"),
    [
        ("bark", "no model of its own", "with a forward takes a BarkConfig"),
        # Its two parts are shrunk each by itself, and then do not fit each other.
        ("fastspeech2_conformer_with_hifigan", "not run", "size of tensor"),
    ],
)
def test_what_cannot_be_judged_says_why(model_type: str, status: str, reason: str) -> None:
    result = judge_transformers(model_type)
    assert result.status == status
    assert reason in result.reason
