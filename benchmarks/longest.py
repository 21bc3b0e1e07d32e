"""The longest sequence of Llama-3.1-8B with LoRA on one GPU: what fits, and the time of a token.

    python benchmarks/longest.py --json benchmarks/results/longest-h200.json      # one GPU
    python benchmarks/longest.py --device cpu --tiny                              # a trial, counted bytes

With fused attention all bytes of a step grow in proportion to the length. So the peak of a step is measured
at three lengths; the line through the last two gives the longest one that fits, and the distance of the first
from that line is told. A step at hundreds of thousands of tokens would take minutes. One row of tokens, rank
16 on all Linears, states of AdamW counted, 3 % of the memory beside the weights left for the allocator.

- bf16 weights, all of the GPU's memory: unpatched, with transformers' checkpointing, Liger's, `auto`, and
  *fit*: the least budget of `auto`, at which blocks run again from inputs in host memory;
- 4-bit weights, 24 GiB: what runs blocks again, and *fit*. Where bitsandbytes is not installed these rows are
  left out: bf16 weights within another memory are not the same.

Unsloth changes transformers for the whole process, so its rows are measured in a process of their own and
added to the file: ``--variants unsloth unsloth+checkpointing``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from predicted import CountedPeak, pack  # beside this file
from whole import with_unsloth

from lowmem_patch import patch_model, unpatch_model
from lowmem_patch.bench import SHAPES, environment, find_variant
from lowmem_patch.errors import BudgetError, VariantError
from lowmem_patch.memory import model_state_bytes, run_step
from lowmem_patch.tracing.inputs import ExampleInputs

GIB = 2**30
LENGTHS = (2048, 4096, 8192)
PLAIN = (
    "unpatched",
    "unpatched+checkpointing",
    "liger",
    "liger+checkpointing",
    "auto",
    "auto+checkpointing",
)
UNSLOTH = ("unsloth", "unsloth+checkpointing")
RANK = 16
FRAGMENTS = 0.03


@dataclasses.dataclass(frozen=True)
class Case:
    """Weights, the memory of one GPU, and what is measured."""

    name: str
    memory: int
    quantised: bool
    variants: tuple[str, ...]


def build(case: Case, device: str, layers: int, tiny: bool) -> Any:
    with torch.device(device):
        model: Any = tiny_llama() if tiny else SHAPES["llama-3.1-8b"].build(layers)
    model.config.use_cache = False
    if case.quantised:
        pack(model)
    config = LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(model, config, autocast_adapter_dtype=False).train()


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def at_length(model: Any, length: int, device: str) -> tuple[int, float]:
    """Bytes of a step's peak above the weights, and seconds of a step."""
    tokens = torch.randint(3, 250, (1, length), device=device)
    inputs = ExampleInputs((), {"input_ids": tokens})
    model.zero_grad(set_to_none=True)
    for _ in range(2):  # warms up, and makes the gradients anew
        run_step(model, inputs)
        model.zero_grad(set_to_none=True)
    if device == "cpu":
        start = time.perf_counter()
        with CountedPeak((*model.parameters(), *model.buffers())) as live:
            run_step(model, inputs)
        return live.most, time.perf_counter() - start
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run_step(model, inputs)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() - before, statistics.median(seconds)


def fit_least(model: Any, length: int, device: str) -> None:
    """Patch for the least budget at a length."""
    tokens = {"input_ids": torch.randint(3, 250, (1, length), device=device)}
    unpatch_model(model)
    try:
        patch_model(model, "auto", example_inputs=tokens, fit=1)
    except BudgetError as error:
        assert error.least is not None, error
        patch_model(model, "auto", example_inputs=tokens, fit=error.least)


def row(case: Case, variant: str, device: str, layers: int, tiny: bool) -> dict[str, Any]:
    """Peaks and times of a variant, and the longest sequence."""
    lengths = tuple(length // 64 for length in LENGTHS) if tiny else LENGTHS
    if variant in UNSLOTH:
        model = with_unsloth(
            lambda: SHAPES["llama-3.1-8b"].build(layers), RANK, lengths[-1],
            checkpointing=variant != "unsloth", four_bit=case.quantised,
        ).train()  # fmt: skip
    else:
        model = build(case, device, layers, tiny)
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    states = weights + model_state_bytes(model, "adamw").optimizer
    given = ExampleInputs((), {"input_ids": torch.randint(3, 250, (1, lengths[0]), device=device)})
    try:
        if variant == "fit":
            fit_least(model, lengths[1], device)  # its levels serve every length
        elif variant not in UNSLOTH:
            model = find_variant(variant)(model, given)
        points = [at_length(model, length, device) for length in lengths]
    except VariantError as error:
        return {"skipped": str(error)}
    peaks, seconds = zip(*points, strict=True)
    slope = (peaks[2] - peaks[1]) / (lengths[2] - lengths[1])
    base = peaks[2] - slope * lengths[2]
    room = (case.memory - states) * (1 - FRAGMENTS)
    return {
        "states": states, "lengths": lengths, "peaks": peaks, "bytes_per_token": slope,
        "off_the_line": (base + slope * lengths[0]) / peaks[0] - 1,
        "longest": max(0, int((room - base) / slope)), "ms_per_token": 1e3 * seconds[2] / lengths[2],
    }  # fmt: skip


def run(
    cases: list[Case], device: str, layers: int, tiny: bool, limit: float
) -> list[dict[str, Any]]:
    start, rows = time.perf_counter(), []
    for case in cases:
        for variant in case.variants:
            if time.perf_counter() - start > limit:
                found: dict[str, Any] = {"skipped": "no time was left"}
            else:
                try:
                    found = row(case, variant, device, layers, tiny)
                except torch.OutOfMemoryError as error:
                    found = {
                        "case": case.name,
                        "variant": variant,
                        "skipped": f"out of memory: {error}",
                    }
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
            found = {"case": case.name, "variant": variant, **found}
            rows.append(found)
            show(found)
    print(f"{time.perf_counter() - start:.0f} s")
    return rows


def merged(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of both, case by case; the later ones in the place of Unsloth's earlier ones."""
    every = [*(row for row in earlier if row["variant"] not in UNSLOTH), *rows]
    names = list(dict.fromkeys(row["case"] for row in every))
    return sorted(every, key=lambda row: names.index(row["case"]))


def show(found: dict[str, Any]) -> None:
    label = f"{found['case']:18} {found['variant']:26}"
    if "skipped" in found:
        print(f"{label} {found['skipped'][:200]}", flush=True)
        return
    print(
        f"{label} {found['longest']:10,} tokens, {found['bytes_per_token'] / 2**10:9.1f} KiB a token, "
        f"{found['ms_per_token']:.4f} ms a token at {found['lengths'][2]}, first length "
        f"{100 * found['off_the_line']:+.2f} % off the line",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a trial at tiny widths")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--variants", nargs="+", help="only these")
    parser.add_argument("--time-limit", type=float, default=230.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    memory = torch.cuda.mem_get_info()[0] if cuda else GIB
    cases = [Case("bf16, the GPU", memory, quantised=False, variants=(*PLAIN, "fit"))]
    if not cuda or importlib.util.find_spec("bitsandbytes") is None:
        print("4 bits within 24 GiB: left out, without a GPU or bitsandbytes")
    else:
        cases.append(
            Case("4 bits, 24 GiB", 24 * GIB, quantised=True, variants=(*PLAIN[1::2], "fit"))
        )
    earlier: list[dict[str, Any]] = []
    if set(arguments.variants or ()) & set(UNSLOTH):
        if not set(arguments.variants) <= set(UNSLOTH):
            parser.error(
                "--variants: unsloth changes transformers: measure others in another process"
            )
        cases = [dataclasses.replace(c, variants=UNSLOTH[c.quantised :]) for c in cases]
        if arguments.json is not None and arguments.json.exists():
            earlier = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
    if arguments.variants:
        cases = [
            dataclasses.replace(c, variants=tuple(v for v in c.variants if v in arguments.variants))
            for c in cases
        ]
    rows = run(cases, arguments.device, arguments.layers, arguments.tiny, arguments.time_limit)
    if arguments.json is not None:
        data = {
            "environment": environment(arguments.device),
            "layers": arguments.layers,
            "rows": merged(earlier, rows),
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
