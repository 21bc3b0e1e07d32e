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


@dataclasses.dataclass(frozen=True)
class Shape:
    """How to build a model, and the set-up that it is usually trained in.

    Attributes:
        build: takes the number of layers; makes the model on the device of the context.
        layers: the default number; None: the depth is fixed, and ``build`` ignores its argument.
        batch, length: rows, and tokens of each; no length for a model that reads images.
        autocast: under bfloat16 autocast; the weights have the dtype in which ``build`` makes them.
        name: of the model whose shape it is.
        whole_layers: of that model; None where the depth is fixed.
        head: whether it has the model's head, and so its loss.
    """

    build: Callable[[int], nn.Module]
    layers: int | None
    batch: int
    length: int | None
    autocast: bool
    name: str
    whole_layers: int | None = None
    head: bool = False

    def part(self, layers: int | None = None) -> str:
        """What ``layers`` (the default number) of it stand for."""
        layers = layers or self.layers
        if self.whole_layers is None:
            found = f"all of {self.name}"
        elif layers == self.whole_layers:
            found = f"all {layers} layers of {self.name}"
        else:
            found = f"{layers} of the {self.whole_layers} layers of {self.name}"
        return f"{found}, with its head" if self.head else f"{found}, without a head"


def _llama(layers: int, **sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes |= {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": layers}
    return nn.Module.to(LlamaModel(LlamaConfig(**sizes)), torch.bfloat16)


def _with_head(family: str, layers: int, **sizes: Any) -> nn.Module:
    """Made in bfloat16, not cast: float32 weights of 8B parameters would need 32 GB first."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=layers, dtype="bfloat16", **sizes
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    return model


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


_LLAMA_7B = partial(_llama, intermediate_size=11008, vocab_size=32000)
_LLAMA_3_8B = partial(
    _llama, intermediate_size=14336, vocab_size=128256, num_key_value_heads=8,
    max_position_embeddings=8192,
)  # fmt: skip
_LLAMA_3_1_8B = partial(
    _with_head, "Llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)  # fmt: skip
_QWEN2_5_0_5B = partial(
    _with_head, "Qwen2", hidden_size=896, intermediate_size=4864, num_attention_heads=14,
    num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True,
)  # fmt: skip

# Four layers of a LLaMA tell as much of a block as forty: its blocks are all alike. Of a whole step they do
# not: there the head and the loss count.
SHAPES = {
    "llama-7b": Shape(_LLAMA_7B, 4, 4, 2048, False, "LLaMA-7B", 32),
    "llama-3-8b": Shape(_LLAMA_3_8B, 4, 4, 2048, False, "Llama-3-8B", 32),
    "llama-3.1-8b": Shape(_LLAMA_3_1_8B, 32, 2, 4096, False, "Llama-3.1-8B", 32, head=True),
    "qwen2.5-0.5b": Shape(_QWEN2_5_0_5B, 24, 4, 2048, False, "Qwen2.5-0.5B", 24, head=True),
    "vit-b": Shape(_vit_b, 12, 128, None, True, "ViT-B/16", 12, head=True),
    "roberta-base": Shape(_roberta_base, 12, 64, 256, True, "RoBERTa-base", 12),
    "swin-t": Shape(_swin_t, None, 64, None, True, "Swin-T", head=True),
}
