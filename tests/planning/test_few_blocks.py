"""A plan made from a few of many equal blocks is the plan of the whole model."""

from __future__ import annotations

import types
from typing import Any

import pytest
import timm
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from lowmem_patch import plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.memory.blocks import repeated_blocks
from lowmem_patch.memory.few_blocks import _line_of_text, make_plans
from lowmem_patch.tracing.example_inputs import make_example_inputs
from tests.support.tiers import slow_but

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MANY = 7


def llama(layers: int = 12) -> Any:
    """Some of whose blocks have numbers of two digits."""
    config = transformers.LlamaConfig(**WIDTHS, num_hidden_layers=layers, vocab_size=64)
    return transformers.LlamaForCausalLM(config)


def lora() -> Any:
    return get_peft_model(llama(MANY), LoraConfig(r=4, target_modules="all-linear"))


def bert() -> Any:
    config = transformers.BertConfig(**WIDTHS, num_hidden_layers=MANY, vocab_size=64)
    return transformers.BertForMaskedLM(config)


def vit() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=MANY, num_heads=4
    )


def gemma() -> Any:
    """Layers of two kinds: five of six attend to a window."""
    config = transformers.Gemma3TextConfig(
        **WIDTHS, num_hidden_layers=MANY, vocab_size=64, head_dim=8
    )
    return transformers.Gemma3ForCausalLM(config)


# each preset on two families, each family under two presets
@pytest.mark.parametrize(
    ("make", "preset"),
    slow_but(
        [
            (llama, "auto"), (llama, "exact"), (lora, "auto"), (lora, "compact"), (bert, "exact"),
            (bert, "paper"), (vit, "paper"), (vit, "compact"),
        ],
        (llama, "auto"), (bert, "exact"), (vit, "compact"),
    ),
)  # fmt: skip
def test_the_report_is_that_of_the_whole(make: Any, preset: str) -> None:
    with torch.device("meta"):
        model = make()
    inputs = make_example_inputs(model, batch_size=2, sequence_length=9)
    plans = make_plans(model, load_config(preset), inputs)
    assert plans.few is not None and plans.few.depth == 4
    whole = plan_patch(model, preset, example_inputs=inputs)
    for name in ("sites", "blocks", "notes", "floor_blocks", "kinds"):
        assert getattr(plans.report, name) == getattr(whole, name), name
    assert plans.report == whole


@pytest.mark.parametrize(
    ("few", "more", "found"),
    [
        ("3 rotary embeddings: 21", "4 rotary embeddings: 28", "10 rotary embeddings: 70"),
        ("its 1,000 logits, layers.0", "its 1,000 logits, layers.0", "its 1,000 logits, layers.0"),
        ("1,500 of 007", "2,000 of 007", "5,000 of 007"),
        ("3 of (a, b)", "4 of (a, b, ...)", None),
    ],
)
def test_numbers_in_sentences_grow(few: str, more: str, found: str | None) -> None:
    assert _line_of_text(few, more, 7) == found


@pytest.mark.parametrize(
    ("kinds", "found"), [("aaaaaaaa", "blocks"), ("baaaaaaa", "blocks"), ("abababab", None)]
)
def test_the_config_may_tell_blocks_apart(kinds: str, found: str | None) -> None:
    """Such as transformers' ``layer_types``; the first block may always be another."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in kinds)
    model.config = types.SimpleNamespace(layer_types=list(kinds))  # type: ignore[assignment]
    assert repeated_blocks(model) == found


def test_a_setting_may_count_the_blocks_and_no_more() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Dropout(0.5) for _ in range(8))
    for number, block in enumerate(model.blocks):
        block.register_parameter("weight", nn.Parameter(torch.ones(3)))
        block.layer_idx = number  # type: ignore[assignment]
    assert repeated_blocks(model) == "blocks"
    model.blocks[5].p = 0.25  # type: ignore[assignment]
    assert repeated_blocks(model) is None


def test_layers_of_two_kinds_are_all_planned() -> None:
    with torch.device("meta"):
        model = gemma()
    inputs = make_example_inputs(model, batch_size=2, sequence_length=9)
    plans = make_plans(model, load_config("auto"), inputs)
    assert plans.few is None
    assert plans.report == plan_patch(model, "auto", example_inputs=inputs)
