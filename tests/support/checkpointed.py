"""Models whose blocks run again in backward, at each level."""

from __future__ import annotations

import copy
import functools
from typing import Any

import timm
import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.models import FAMILIES, llama_of
from tests.support.stacks import (
    blocks_of,
    patched,
    rows,
    stack,
)
from tests.support.step import Step, step, warned

LEVELS = ("offloaded", "attention", "checkpointed", "host", "segment", "halves")


def assert_same_bits(found: Step, wanted: Step) -> None:
    assert found.gradients.keys() == wanted.gradients.keys()
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert torch.equal(one, other)
    different = [n for n, g in wanted.gradients.items() if not torch.equal(g, found.gradients[n])]
    assert not different


@functools.cache
def _patched_stack() -> tuple[Any, Any]:
    model = stack()
    return patched(model, rows()), blocks_of(model, rows())


def patched_stack() -> tuple[Any, Any]:
    """A copy of a patched stack, which is planned once a process, and its blocks."""
    model, blocks = _patched_stack()
    return copy.deepcopy(model), blocks


@functools.cache
def _patched_llama(dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, inputs = llama_of().to(dtype).train(), FAMILIES["llama"].inputs()
    return patched(model, inputs), blocks_of(model, inputs)


def patched_llama(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A copy of a patched LLaMA, which is planned once a process, and its blocks."""
    model, blocks = _patched_llama(dtype)
    return copy.deepcopy(model), blocks


def one_step(model: Any, inputs: Any) -> Step:
    with warned():  # of forwards that were given after the patch
        return step(model, inputs)


def lora_with_dropout() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(llama_of(attention_dropout=0.1).bfloat16(), config)


def t5_with_dropout() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, dropout_rate=0.2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def swin_with_paths() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
        window_size=7, num_classes=3, drop_path_rate=0.3,
    )  # fmt: skip


MODELS: dict[str, tuple[Any, Any]] = {
    "stack": (stack, rows),
    "llama-lora-dropout": (lora_with_dropout, FAMILIES["llama"].inputs),
    "t5-dropout": (t5_with_dropout, FAMILIES["t5"].inputs),
    "swin-drop-path": (
        swin_with_paths,
        lambda: torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1)),
    ),
    **{
        name: (FAMILIES[name].build, FAMILIES[name].inputs)
        for name in ("bert", "vit", "timm-swin-pads")
    },
}


def prepared(name: str, steps: dict[str, Any]) -> Any:
    """The patched model in training mode, its blocks, its inputs, and its step without checkpointing."""
    if name not in steps:
        make, inputs = MODELS[name][0], MODELS[name][1]()
        torch.manual_seed(0)
        model = make().train()
        blocks = blocks_of(model, inputs)
        model = patched(model, inputs, "auto")
        steps[name] = model, blocks, inputs, one_step(model, inputs)
    return steps[name]
