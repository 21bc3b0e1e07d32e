"""Where biases are far larger than what they are added to, attention saves in full under 8-bit storage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, Qwen2Config, Qwen2Model

from lowmem_patch import patch_model, plan_patch
from tests.support.quantised import in_bits

IDS = {"input_ids": torch.arange(64).view(2, 32) * 7 % 100}
LEFT = "what attention saves stays in full in"


def qwen2(change: Callable[[Any], None]) -> Any:
    """Without outliers, the weights make about 0.7 of a token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    model = Qwen2Model(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                parameter *= 3
        for layer in model.layers:
            change(layer.self_attn)
    return model


def keys(size: float) -> Callable[[Any], None]:
    """Outliers where rotary embeddings hardly turn, which softmax does not see: queries are small there."""

    def change(attention: Any) -> None:
        for head in range(0, 128, 32):
            attention.k_proj.bias[head + 15] += size
            attention.k_proj.bias[head + 31] -= size
            for channel in (head + 15, head + 31):
                attention.q_proj.weight[channel] *= 0.05

    return change


def values(size: float) -> Callable[[Any], None]:
    def change(attention: Any) -> None:
        attention.v_proj.bias.normal_(0, size)

    return change


def notes(model: nn.Module, inputs: Any) -> list[str]:
    return [
        note for note in plan_patch(model, "compact", example_inputs=inputs).notes if LEFT in note
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(**IDS).last_hidden_state.tanh().square().sum().backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("change", [keys(5.0), keys(100.0), values(0.5), values(5.0)])
def test_gradients_stay_along_the_truth(change: Callable[[Any], None]) -> None:
    model = qwen2(change)
    exact = gradients(copy.deepcopy(model).double())
    (note,) = notes(model, IDS)
    which = "k_proj" if model.layers[0].self_attn.k_proj.bias.any() else "v_proj"
    assert "2 modules, as in layers.0.self_attn: a bias, or beta in front, is up to" in note
    assert f"times what the weight of layers.0.self_attn.{which} makes of a token" in note
    found = gradients(patch_model(model, "compact", example_inputs=IDS))
    largest = max(float(gradient.norm()) for gradient in exact.values())
    judged = {n: g for n, g in exact.items() if g.dim() == 2 and g.norm() > 1e-4 * largest}
    assert len(judged) >= 10
    for name, gradient in judged.items():
        cosine = torch.cosine_similarity(gradient.flatten(), found[name].flatten(), 0)
        assert cosine >= 0.999, (name, float(cosine))


@pytest.mark.parametrize("change", [keys(0.0), keys(1.5), values(0.1)])
def test_biases_of_a_usual_size_are_stored(change: Callable[[Any], None]) -> None:
    assert notes(qwen2(change), IDS) == []


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("bits", [4, 8])
def test_biases_beside_weights_of_few_bits(bits: int) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for size, left in ((1.5, 0), (30.0, 1)):
        model = in_bits(qwen2(keys(size)).bfloat16(), bits)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names)).train()
        assert len(notes(adapted, IDS)) == left, size


def test_beta_in_front_counts_as_a_bias() -> None:
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4)).train()
    assert notes(model, IDS) == []
    with torch.no_grad():
        model.h[0].ln_1.bias.normal_(0, 1)  # as large as gamma z
    (note,) = notes(model, IDS)
    assert "the weight of h.0.attn.c_attn makes of a token" in note


@pytest.mark.parametrize(("part", "size", "left"), [(0, 1.0, 0), (1, 9.0, 1), (2, 1.0, 1)])
def test_parts_of_one_linear_are_told_apart(part: int, size: float, left: int) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=64, depth=1, num_heads=2, num_classes=5
    ).train()
    qkv: Any = model.blocks[0].attn.qkv
    with torch.no_grad():
        qkv.weight.normal_(0, 1 / 8)  # makes 1 of a token
        qkv.bias[64 * part : 64 * (part + 1)].normal_(0, size)
    assert len(notes(model, torch.randn(2, 3, 16, 16))) == left


def test_a_plan_without_data_stores_all() -> None:
    with torch.device("meta"):
        model = qwen2(lambda attention: None)
    assert notes(model, IDS) == []
