"""Fifty steps of real training: the loss curve of ``exact`` is the unpatched one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lowmem_patch import patch_model, patch_report
from tests.support.models import EVERY_FAMILY, FAMILIES, Inputs, build
from tests.support.step import tensors_of
from tests.support.tiers import slow_but

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

STEPS = 50
# each step may round the loss otherwise, by a unit of float32 at about 2
TOLERANCE = STEPS * 2 * torch.finfo(torch.float32).eps
# the others of a kind (Mistral, RoBERTa, the other library's ViT and Swin) take the same patches
NAMES = ["llama", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "bert", "t5", "timm-vit", "swin"]


def curve(model: Any, inputs: Inputs) -> list[float]:
    """Losses of AdamW on one batch, towards a fixed target."""
    torch.manual_seed(0)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        output = tensors_of(model(**inputs))[0]
        if output.shape[-1] == 64 and "input_ids" in inputs:  # scores of the vocabulary
            labels = inputs.get("decoder_input_ids", inputs["input_ids"])
            loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
        else:
            target = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
            loss = (output - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_curve(model: Any, inputs: Inputs, make_patched: Callable[[Any], Any]) -> None:
    expected = curve(copy.deepcopy(model), inputs)
    found = curve(make_patched(model), inputs)
    assert expected[-1] < 0.9 * expected[0]  # it did learn
    worst = max(abs(one - two) for one, two in zip(found, expected, strict=True))
    assert worst <= TOLERANCE, worst


@pytest.mark.parametrize("name", slow_but(NAMES, "llama", "bert", "timm-vit"))
def test_fifty_steps_of_training_follow_the_unpatched_curve(name: str) -> None:
    model, inputs = build(EVERY_FAMILY[name]), EVERY_FAMILY[name].inputs()

    def patched(model: Any) -> Any:
        patch_model(model, "exact", example_inputs=inputs)
        strategies = {site.strategy for site in patch_report(model).patched}
        assert strategies == {"share", "recompute"}
        return model

    assert_same_curve(model, inputs, patched)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["llama", "timm-vit"])
def test_fifty_steps_of_adapters_follow_the_unpatched_curve(name: str, dropout: float) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.inputs()
    config = LoraConfig(r=4, lora_alpha=32, target_modules=family.linears, lora_dropout=dropout)
    adapted = get_peft_model(model, config)
    assert_same_curve(
        adapted, inputs, lambda model: patch_model(model, "exact", example_inputs=inputs)
    )
