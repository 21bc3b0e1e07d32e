"""Small checkpoints for the tests, random, with gammas, betas and biases that are no identities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import nn

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGES = {"image_size": 16, "patch_size": 8}


def randomise(model: nn.Module) -> nn.Module:
    """Gammas, betas and biases far from 1 and 0, so that a wrong fold shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def llama(*, tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **SMALL)
    return randomise(transformers.LlamaForCausalLM(config))


def gemma() -> nn.Module:
    config = transformers.GemmaConfig(vocab_size=64, num_key_value_heads=1, head_dim=16, **SMALL)
    return randomise(transformers.GemmaForCausalLM(config))


def vit() -> nn.Module:
    return randomise(
        transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES, **SMALL))
    )


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        embed_dim=16, depths=[1, 1], num_heads=[1, 2], image_size=32, window_size=4
    )
    return randomise(transformers.SwinForImageClassification(config))


def bert() -> nn.Module:
    return randomise(transformers.BertModel(transformers.BertConfig(vocab_size=64, **SMALL)))


TIMM_ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def write_timm(folder: Path) -> nn.Module:
    arguments = {**TIMM_ARGUMENTS, "num_classes": 5}
    model = randomise(timm.create_model("vit_tiny_patch16_224", **arguments))
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "gemma": gemma,
    "vit": vit,
    "swin": swin,
}


def example(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    if model.main_input_name == "input_ids":
        return {"input_ids": torch.randint(0, 64, (2, 9), generator=generator)}
    size = model.config.image_size
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def write(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder
