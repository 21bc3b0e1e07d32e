"""A LLaMA of two small layers, and tokens for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from lowmem_patch.tracing.inputs import ExampleInputs


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
    )
    return transformers.LlamaForCausalLM(config).train()


def tokens() -> ExampleInputs:
    return ExampleInputs((), {"input_ids": torch.randint(0, 50, (2, 12))})
