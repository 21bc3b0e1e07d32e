"""What the rules of zoo/shrink.py and zoo/feeds.py cannot know of single architectures. Tests only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FEEDS", "OVERRIDES"]

_NARROW = {
    "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "image_size": 64,
}  # fmt: skip

# ``arguments`` go to the config's constructor, and ``values`` are set after shrinking (dotted paths)
OVERRIDES: dict[str, dict[str, Any]] = {
    # a forecast needs its length
    "autoformer": {"arguments": {"prediction_length": 8, "context_length": 16}},
    "informer": {"arguments": {"prediction_length": 8, "context_length": 16}},
    "time_series_transformer": {"arguments": {"prediction_length": 8, "context_length": 16}},
    # the default maps no image token
    "chameleon": {"arguments": {"vocabulary_map": {"<image>": 140}}},
    "emu3": {"arguments": {"vocabulary_map": {"<image>": 140}}},
    # its width follows from its coefficient
    "efficientnet": {"values": _NARROW},
    "align_vision_model": {"values": _NARROW},
    "align": {"values": {f"vision_config.{name}": value for name, value in _NARROW.items()}},
    # timm's own test model in place of one that must be named
    "timm_backbone": {"arguments": {"backbone": "test_resnet"}},
    "timm_wrapper": {"arguments": {"architecture": "test_vit"}},
    "lw_detr": {"arguments": {"projector_scale_factors": [1.0]}},
    "lfm2_moe": {"arguments": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}},
    # heads of this size fill twice the width
    "mamba2": {"arguments": {"hidden_size": 32, "num_heads": 8, "head_dim": 8}},
    # an attention layer among the two that are left
    "bamba": {"arguments": {"attn_layer_indices": [1]}},
    # window of local attention, of which the default pads a short text with rows that see nothing
    "longformer": {"arguments": {"attention_window": 8}},
    "led": {"arguments": {"attention_window": 8}},
}


def _image_with_noise(config: Any) -> dict[str, Any]:
    """The noise that decides what is masked, which float64 would draw differently."""
    patches = (config.image_size // config.patch_size) ** 2
    image = torch.randn(2, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": image, "noise": torch.rand(2, patches)}


# keyword arguments of one forward, from the config
FEEDS: dict[str, Callable[[Any], dict[str, Any]]] = {"vit_mae": _image_with_noise}
