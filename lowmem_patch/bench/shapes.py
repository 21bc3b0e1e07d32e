"""Known models by their shapes, with random weights: nothing is downloaded.

transformers and timm are imported when a model is built, as a command that builds none should not wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["SHAPES", "Shape"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How to build a model, and the set-up that it is usually trained in.

    Attributes:
        build: takes the number of layers; makes the model on the device of the context.
        layers: the default number; None: the depth is fixed, and ``build`` ignores its argument.
        batch, length: rows, and tokens of each; no length for a model that reads images.
        autocast: under bfloat16 autocast; the weights have the dtype in which ``build`` makes them.
    """

    build: Callable[[int], nn.Module]
    layers: int | None
    batch: int
    length: int | None
    autocast: bool


def _llama(layers: int, **sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_hidden_layers=layers, **sizes
    )
    return nn.Module.to(LlamaModel(config), torch.bfloat16)


def _vit_b(layers: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("vit_base_patch16_224", depth=layers)
    return model


def _roberta_base(layers: int) -> nn.Module:
    from transformers import RobertaConfig, RobertaModel

    # without dropout, as most fine-tuning is run; each dropout would save a tensor of its own
    config = RobertaConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        vocab_size=50265, max_position_embeddings=514,
    )  # fmt: skip
    return RobertaModel(config, add_pooling_layer=False)


def _swin_t(_layers: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0)
    return model


_LLAMA_7B = {"intermediate_size": 11008, "vocab_size": 32000}
_LLAMA_3_8B = {
    "intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip

# Four layers of a LLaMA tell as much as forty: its blocks are all alike.
SHAPES = {
    "llama-7b": Shape(partial(_llama, **_LLAMA_7B), 4, 4, 2048, False),
    "llama-3-8b": Shape(partial(_llama, **_LLAMA_3_8B), 4, 4, 2048, False),
    "vit-b": Shape(_vit_b, 12, 128, None, True),
    "roberta-base": Shape(_roberta_base, 12, 64, 256, True),
    "swin-t": Shape(_swin_t, None, 64, None, True),
}
