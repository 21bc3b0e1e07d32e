"""The curve of memory against time of a fitted model: predicted and measured peak, and the step's time.

    python benchmarks/fit.py --device cuda

Each budget is given as the step's peak above weights and optimizer state, in MiB. A model with random
weights is patched for each budget in turn, and runs some steps with fused AdamW; peaks are those of torch's
allocator.
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
from lowmem_patch.bench import environment
from lowmem_patch.errors import BudgetError
from lowmem_patch.memory import model_state_bytes

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
MIB = 2**20
NO_BUDGET = 10**6  # MiB


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
    return get_peft_model(model, adapters).train()


def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    # without a name for the output, as in trainers: its logits are free before the backward
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)


def measure(model: nn.Module, tokens: torch.Tensor, steps: int) -> tuple[float, float]:
    """Bytes at the peak of forward and backward above what lay there before, and milliseconds of a step."""
    cuda = tokens.is_cuda
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    for _ in range(2):
        step(model, optimizer, tokens)
    gc.collect()
    peak, times = 0, []
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        start = time.perf_counter()
        step(model, optimizer, tokens)
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    if cuda:
        peak = torch.cuda.max_memory_allocated() - before
    return peak, statistics.median(times)


def row(model: Any, tokens: torch.Tensor, arguments: argparse.Namespace, above: float) -> Any:
    """One budget: what was chosen, predicted and measured."""
    states = model_state_bytes(model, "adamw")
    found: dict[str, Any] = {"asked_mib": above}
    budget = states.parameters + states.optimizer + round(above * MIB)
    start = time.perf_counter()
    try:
        inputs = {"input_ids": tokens}
        patch_model(model, arguments.preset, example_inputs=inputs, fit=budget, optimizer="adamw")
    except BudgetError as error:
        return {**found, "error": str(error)}
    report = patch_report(model).fit
    assert report is not None
    planned = time.perf_counter() - start
    peak, milliseconds = measure(model, tokens, arguments.steps)
    return {
        **found,
        "plan_s": planned,
        "predicted_mib": (report.predicted - report.parameters - report.optimizer_state) / MIB,
        "reserve_mib": report.reserve / MIB,
        "measured_mib": peak / MIB,
        "step_ms": milliseconds,
        "predicted_extra_ms": 1e3 * report.extra_seconds,
        "moment": report.moment,
        "levels": report.levels,
        "order": [block.level for block in report.blocks],
        "host_mib": report.on_host / MIB,
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
        "--budgets", type=float, nargs="+", metavar="MIB",
        default=[NO_BUDGET, 24383, 13714, 8315, 3655, 3200, 2114, 1526],
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
            print(f"{above:9.0f} MiB: {found['error']}", flush=True)
            continue
        print(
            f"{above:9.0f} MiB: predicted {found['predicted_mib']:.0f}, measured "
            f"{found['measured_mib']:.0f}, planned in {found['plan_s']:.0f} s, "
            f"{found['step_ms']:.1f} ms (predicted {found['predicted_extra_ms']:.1f} more), "
            f"peak in {found['moment']}, {found['levels']}",
            flush=True,
        )
    if arguments.json is not None:
        data = {"environment": environment(arguments.device), "rows": rows}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
