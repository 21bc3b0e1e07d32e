"""The curve of memory against time of a fitted model: predicted and measured peak, and the step's time.

    python benchmarks/fit.py --device cuda

Each budget is given as the step's peak above weights and optimizer state, in GB (10^9 bytes). A model with
random weights is patched for each budget in turn, and runs some steps; peaks are those of torch's allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.errors import BudgetError

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
    },
}  # fmt: skip
GB = 10**9


def build(arguments: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(SHAPES[arguments.shape])
    if arguments.layers is not None:
        sizes["num_hidden_layers"] = arguments.layers
    config = LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(arguments.device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    if arguments.full:
        return model.train()
    adapters = LoraConfig(r=arguments.rank, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(model, adapters, autocast_adapter_dtype=False).train()


def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    # without a name for the output, as in trainers: its logits are free before the backward
    model(input_ids=tokens, labels=tokens).loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def measure(model: nn.Module, tokens: torch.Tensor, steps: int) -> tuple[float, float]:
    """Bytes at the peak of forward and backward above what lay there before, and milliseconds of a step."""
    cuda = tokens.is_cuda
    for _ in range(2):
        step(model, None, tokens)
    gc.collect()
    peak, times = 0, []
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        start = time.perf_counter()
        step(model, None, tokens)
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    if cuda:
        peak = torch.cuda.max_memory_allocated() - before
    return peak, statistics.median(times)


def row(model: Any, tokens: torch.Tensor, arguments: argparse.Namespace, above: float) -> Any:
    """One budget: what was chosen, predicted and measured."""
    states = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    found: dict[str, Any] = {"asked_gb": above}
    budget = states + round(above * GB)
    start = time.perf_counter()
    try:
        inputs = {"input_ids": tokens}
        patch_model(model, arguments.preset, example_inputs=inputs, fit=budget, optimizer="sgd")
    except BudgetError as error:
        return {**found, "error": str(error)}
    report = patch_report(model).fit
    assert report is not None
    peak, milliseconds = measure(model, tokens, arguments.steps)
    return {
        **found,
        "plan_s": time.perf_counter() - start,
        "predicted_gb": (report.predicted - report.parameters - report.optimizer_state) / GB,
        "reserve_gb": report.reserve / GB,
        "measured_gb": peak / GB,
        "step_ms": milliseconds,
        "predicted_extra_ms": 1e3 * report.extra_seconds,
        "moment": report.moment,
        "levels": report.levels,
        "reserved_gb": torch.cuda.max_memory_reserved() / GB if tokens.is_cuda else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="train all weights, not adapters")
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[1000.0, 24.3, 13.7, 8.3, 3.7, 2.1], metavar="GB",
        help="peaks of a step above weights and optimizer state",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    model = build(arguments)
    vocabulary = SHAPES[arguments.shape]["vocab_size"]
    tokens = torch.randint(
        3, vocabulary, (arguments.batch, arguments.length), device=arguments.device
    )
    rows = []
    for above in arguments.budgets:
        unpatch_model(model)
        found = row(model, tokens, arguments, above)
        rows.append(found)
        if "error" in found:
            print(f"{above:7.1f} GB: {found['error']}")
            continue
        print(
            f"{above:7.1f} GB: predicted {found['predicted_gb']:.3f}, measured "
            f"{found['measured_gb']:.3f} GB, "
            f"{found['step_ms']:.1f} ms (predicted {found['predicted_extra_ms']:.1f} ms more), "
            f"peak in {found['moment']}, {found['levels']}",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
