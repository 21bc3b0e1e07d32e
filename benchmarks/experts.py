"""What patching saves of LoRA on the experts of mixtures: act, peak memory and step time on a GPU.

    python benchmarks/experts.py --json benchmarks/results/experts-h100.json

Blocks of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b without their heads, in bf16, at random; PEFT's adapters
of rank 16 on attention and on all experts. Columns are those of ``benchmarks/models.py``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from models import Case, measure, show
from peft import LoraConfig, get_peft_model
from torch import nn

from lowmem_patch.bench import Shape, environment

VARIANTS = ["unpatched", "checkpointing", "exact", "auto"]


def _blocks(name: str, layers: int, **sizes: Any) -> nn.Module:
    config = getattr(hf, f"{name}Config")(num_hidden_layers=layers, use_cache=False, **sizes)
    model: nn.Module = getattr(hf, f"{name}Model")(config)
    return model.to(torch.bfloat16)


def qwen(layers: int) -> nn.Module:
    """Qwen3-30B-A3B."""
    return _blocks(
        "Qwen3Moe", layers, hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip


def mixtral(layers: int) -> nn.Module:
    """Mixtral-8x7B, which is the config's default."""
    return _blocks("Mixtral", layers)


def gpt_oss(layers: int) -> nn.Module:
    """gpt-oss-20b."""
    return _blocks("GptOss", layers, num_local_experts=32)


def adapt(model: nn.Module) -> nn.Module:
    """Adapters on attention and on all experts."""
    config = LoraConfig(
        r=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    return get_peft_model(model, config)


CASES = [
    Case("Qwen3-MoE", Shape(qwen, 4, 2, 2048, False, "Qwen3-30B-A3B", 48), adapt, "layers.1"),
    Case("Mixtral", Shape(mixtral, 2, 2, 2048, False, "Mixtral-8x7B", 32), adapt, "layers.1"),
    Case("GPT-OSS", Shape(gpt_oss, 4, 1, 2048, False, "gpt-oss-20b", 24), adapt, "layers.1"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment("cuda"), "cases": {}, "parts": {}}
    for case in CASES:
        found = measure(case, VARIANTS, options.rounds, options.steps)
        results["cases"][case.name] = show(case, found)
        results["parts"][case.name] = case.shape.part()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
