"""A plan made from a few of many equal blocks is the plan of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers
from peft import LoraConfig, get_peft_model

from lowmem_patch import plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.memory.few_blocks import make_plans
from lowmem_patch.tracing.example_inputs import make_example_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MANY = {"num_hidden_layers": 12}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDTHS, **MANY, vocab_size=64))


def lora() -> Any:
    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTHS, **MANY, vocab_size=64))


def vit() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=12, num_heads=4
    )


def gemma() -> Any:
    """Layers of two kinds: five of six attend to a window."""
    config = transformers.Gemma3TextConfig(**WIDTHS, **MANY, vocab_size=64, head_dim=8)
    return transformers.Gemma3ForCausalLM(config)


@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
@pytest.mark.parametrize("make", [llama, lora, bert, vit])
def test_the_report_is_that_of_the_whole(make: Any, preset: str) -> None:
    with torch.device("meta"):
        model = make()
    inputs = make_example_inputs(model, batch_size=2, sequence_length=9)
    plans = make_plans(model, load_config(preset), inputs)
    assert set(plans.plans) == {3, 4}
    whole = plan_patch(model, preset, example_inputs=inputs)
    for name in ("sites", "blocks", "notes", "floor_blocks", "kinds"):
        assert getattr(plans.report, name) == getattr(whole, name), name
    assert plans.report == whole


def test_layers_of_two_kinds_are_all_planned() -> None:
    with torch.device("meta"):
        model = gemma()
    inputs = make_example_inputs(model, batch_size=2, sequence_length=9)
    plans = make_plans(model, load_config("auto"), inputs)
    assert plans.blocks is None and list(plans.plans) == [None]
    assert plans.report == plan_patch(model, "auto", example_inputs=inputs)
