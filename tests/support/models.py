"""Tiny models of every family, stock classes, with norms and biases moved away from 1 and 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support.step import DOUBLE, cast, in_mode

Inputs = dict[str, Tensor]


class Family(NamedTuple):
    """How to build a model, what it reads, and which of its Linears a LoRA user would name."""

    build: Callable[[], Any]
    inputs: Callable[[], Inputs]
    query_value: list[str]
    linears: str  # a regular expression, as PEFT takes one
    folds: bool  # whether a norm of it can be folded (post-norm models keep the affine)


def _text(**extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, **extra,
    }  # fmt: skip


def _tokens() -> Inputs:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 60, (2, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0  # transformers drops a mask of ones, which no fake tensor can know
    return {"input_ids": tokens, "attention_mask": mask}


def _images(name: str, size: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        generator = torch.Generator().manual_seed(7)
        # rounded to what bf16 holds: the rounding of the input is nobody's error
        pixels = torch.randn(2, 3, size, size, generator=generator).bfloat16().float()
        return {name: pixels}

    return make


def _timm_vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )  # fmt: skip


def vit_config(**extra: Any) -> ViTConfig:
    return ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **extra,
    )  # fmt: skip


def _vit() -> nn.Module:
    return ViTModel(vit_config(), add_pooling_layer=False)


def llama_of(**extra: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_text(num_key_value_heads=2, **extra)))


def gemma_of(layers: int) -> Any:
    return GemmaForCausalLM(
        GemmaConfig(**_text(num_hidden_layers=layers, num_key_value_heads=1, head_dim=8))
    )


def _phi3() -> nn.Module:
    return Phi3ForCausalLM(
        Phi3Config(
            **_text(num_hidden_layers=1, pad_token_id=0, eos_token_id=1, num_key_value_heads=2)
        )
    )


def _bert(**extra: Any) -> nn.Module:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**{**_text(), **dropouts, **extra}), add_pooling_layer=False)


def _roberta() -> nn.Module:
    config = RobertaConfig(
        **_text(num_hidden_layers=1, max_position_embeddings=32),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return RobertaModel(config, add_pooling_layer=False)


def _t5() -> nn.Module:
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )  # with its dropouts
    return GPT2LMHeadModel(config)


def _pair() -> Inputs:
    return {**_tokens(), "decoder_input_ids": _tokens()["input_ids"][:, :5].clone()}


def timm_swin(size: int) -> nn.Module:
    """Window 4 on size/4 patches: 32 fits, 36 pads."""
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=size, window_size=4, embed_dim=16, depths=(2, 1),
        num_heads=(2, 2), num_classes=5, drop_path_rate=0.0,
    )  # fmt: skip


def swin_config(size: int) -> SwinConfig:
    return SwinConfig(
        image_size=size, patch_size=4, window_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 2],
        drop_path_rate=0.0,
    )  # fmt: skip


def swin(size: int) -> nn.Module:
    return SwinModel(swin_config(size), add_pooling_layer=False)


_LLAMA = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
_VISION = r".*\.(q_proj|k_proj|v_proj|o_proj|fc1|fc2|query|key|value|dense)"  # last four: transformers 5.0
_VISION_PAIR = ["q_proj", "v_proj", "query", "value"]
_BERT = r".*\.(query|key|value|dense)"
FAMILIES: dict[str, Family] = {
    "timm-vit": Family(_timm_vit, _images("x", 32), ["qkv"], r".*\.(qkv|proj|fc1|fc2)", True),
    "vit": Family(_vit, _images("pixel_values", 32), _VISION_PAIR, _VISION, True),
    "llama": Family(llama_of, _tokens, ["q_proj", "v_proj"], _LLAMA, True),
    "gemma": Family(lambda: gemma_of(1), _tokens, ["q_proj", "v_proj"], _LLAMA, True),
    "phi3": Family(_phi3, _tokens, ["qkv_proj"], r".*\.(qkv_proj|o_proj|gate_up_proj|down_proj)", True),
    "bert": Family(_bert, _tokens, ["query", "value"], _BERT, False),
    "roberta": Family(_roberta, _tokens, ["query", "value"], _BERT, False),
    "t5": Family(_t5, _pair, ["q", "v"], r".*\.(q|k|v|o|wi_0|wi_1|wo)", True),
    "timm-swin": Family(lambda: timm_swin(32), _images("x", 32), ["qkv"], r".*\.(qkv|fc1|fc2)", True),
    "timm-swin-pads": Family(lambda: timm_swin(36), _images("x", 36), ["qkv"], r".*\.(qkv|fc1|fc2)", True),
    "swin": Family(lambda: swin(32), _images("pixel_values", 32), _VISION_PAIR, _VISION, True),
    "swin-pads": Family(lambda: swin(36), _images("pixel_values", 36), _VISION_PAIR, _VISION, True),
}  # fmt: skip
# built like one of the above, for tests of what differs
MORE_FAMILIES: dict[str, Family] = {
    "mistral": Family(
        lambda: MistralForCausalLM(MistralConfig(**_text(num_key_value_heads=2))),
        _tokens, ["q_proj", "v_proj"], _LLAMA, True,
    ),
    "qwen2": Family(
        lambda: Qwen2ForCausalLM(Qwen2Config(**_text(num_key_value_heads=2))),
        _tokens, ["q_proj", "v_proj"], _LLAMA, True,
    ),
    "qwen3": Family(
        lambda: Qwen3ForCausalLM(Qwen3Config(**_text(num_key_value_heads=2, head_dim=8))),
        _tokens, ["q_proj", "v_proj"], _LLAMA, True,
    ),
    "gpt2": Family(_gpt2, _tokens, ["c_attn"], r".*\.(c_attn|c_proj|c_fc)", True),
}  # fmt: skip
EVERY_FAMILY = {**FAMILIES, **MORE_FAMILIES}


def in_each(names: Iterable[str], *modes: str) -> list[tuple[str, str]]:
    """Families and modes, but for Swin, of which one that pads is taken in bf16 and one that does not under
    autocast: what is padded says nothing of the dtype."""
    left_out = {"bf16": ("timm-swin", "swin"), "autocast": ("timm-swin-pads", "swin-pads")}
    return [(n, mode) for n in names for mode in modes if n not in left_out.get(mode, ())]


def randomise(model: nn.Module, seed: int = 1) -> Any:
    """Move gammas, betas and biases away from 1 and 0, and every weight to what bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter += noise
            elif parameter.dim() == 1:
                parameter += 0.5 * noise
            elif "lora_B" in name:
                parameter += 0.2 * noise
            parameter.copy_(parameter.bfloat16())
    return model


def fill_adapters(model: Any) -> Any:
    """B starts as 0, where A has no gradient to compare; values that bf16 holds."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.copy_((0.2 * noise).bfloat16())
    return model


def build(family: Family, seed: int = 1) -> Any:
    """A model of the family with random weights; eval mode, so that repeated runs agree."""
    torch.manual_seed(seed)
    return randomise(family.build(), seed).eval()


def first_blocks(model: Any, count: int | None) -> Any:
    """The same LLaMA or timm ViT with its first blocks alone; all of them where there is no count."""
    parent, name = (model.model, "layers") if hasattr(model, "model") else (model, "blocks")
    if count is not None:
        setattr(parent, name, getattr(parent, name)[:count])
    return model


def doubles(make: Callable[[str], Any], name: str) -> tuple[Any, Inputs]:
    """A family's model and inputs in float64."""
    inputs: Inputs = in_mode(FAMILIES[name].inputs(), DOUBLE)
    return cast(make(name), torch.float64), inputs


def llama() -> Any:
    """The family's LLaMA, to train."""
    return build(FAMILIES["llama"]).train()


def tokens() -> ExampleInputs:
    """What it reads, without a mask."""
    return ExampleInputs((), {"input_ids": _tokens()["input_ids"]})
