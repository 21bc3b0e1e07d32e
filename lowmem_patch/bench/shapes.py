"""Known models by their shapes, with random weights: nothing is downloaded.

Their libraries are imported when one is built: a command that measures nothing would wait for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["SHAPES", "Shape"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How to build a model, and the set-up that it is usually trained in.

    Attributes:
        build: makes the model, with so many layers, on the device of the context.
        layers: how many unless told; None: the depth is fixed, and ``build`` ignores what it gets.
        batch, length: rows, and tokens of each; no length for a model that reads images.
        autocast: under bfloat16 autocast; the weights have the dtype in which ``build`` makes them.
    """

    build: Callable[[int], nn.Module]
    layers: int | None
    batch: int
    length: int | None
    autocast: bool


def _llama_7b(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_hidden_layers=layers,
        vocab_size=32000,
    )  # fmt: skip
    return nn.Module.to(LlamaModel(config), torch.bfloat16)


def _llama_3_8b(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    return nn.Module.to(LlamaModel(config), torch.bfloat16)


def _vit_b(layers: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("vit_base_patch16_224", depth=layers)
    return model


def _roberta_base(layers: int) -> nn.Module:
    from transformers import RobertaConfig, RobertaModel

    # without dropout: it makes a new tensor at each place, and most fine-tuning of today has none
    config = RobertaConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        vocab_size=50265, max_position_embeddings=514,
    )  # fmt: skip
    return RobertaModel(config, add_pooling_layer=False)


def _swin_t(_layers: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0)
    return model


# Four layers of a LLaMA tell what forty do: its blocks are all alike.
SHAPES = {
    "llama-7b": Shape(_llama_7b, 4, 4, 2048, False),
    "llama-3-8b": Shape(_llama_3_8b, 4, 4, 2048, False),
    "vit-b": Shape(_vit_b, 12, 128, None, True),
    "roberta-base": Shape(_roberta_base, 12, 64, 256, True),
    "swin-t": Shape(_swin_t, None, 64, None, True),
}
