"""The families with the heads that checkpoints have, and how to write them to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import nn

from tests.support import models
from tests.support.models import build, gemma_of, llama_of, randomise, swin_config, vit_config


def llama(*, tied: bool = False) -> Any:
    return randomise(llama_of(tie_word_embeddings=tied)).eval()


def gemma() -> Any:
    return randomise(gemma_of(2)).eval()


def vit(**extra: Any) -> Any:
    return randomise(transformers.ViTForImageClassification(vit_config(**extra))).eval()


def swin() -> Any:
    return randomise(transformers.SwinForImageClassification(swin_config(32))).eval()


def bert() -> Any:
    return build(models.FAMILIES["bert"])


TIMM_ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def write_timm(folder: Path) -> nn.Module:
    arguments = {**TIMM_ARGUMENTS, "num_classes": 5}
    model = randomise(timm.create_model("vit_tiny_patch16_224", **arguments)).eval()
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
