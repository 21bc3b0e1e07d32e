"""How near a step comes to its limit: the GPU time of its products and its attention, beside the step's own.

    python benchmarks/limit.py --json benchmarks/results/limit-h200.json     # one GPU

The step is that of ``whole.py``: Llama-3.1-8B with LoRA on all Linears, with head, loss and fused AdamW. It
is measured as patched by ``auto``, and once more where autograd adds up the gradients of what several LoRA
layers read; both take turns in one process. GPU times are sums over the kernels of two profiled steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import DeviceType
from torch.profiler import ProfilerActivity, profile
from whole import CASES, Trial, made

from lowmem_patch.bench import SHAPES, environment
from lowmem_patch.bench.measure import Step
from lowmem_patch.functional import SharedInput
from lowmem_patch.tracing.inputs import ExampleInputs

TURNS, STEPS, PROFILED, WARM_UP = 8, 3, 2, 3
ATTENTION = ("sdpa", "flash", "fmha", "dot_do_o", "convert_dq")
PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "splitk")


def kind_of(kernel: str) -> str:
    """Which part of a step a kernel is of, by its name: attention, products, or the rest."""
    name = kernel.lower()
    if any(word in name for word in ATTENTION):
        return "attention"
    return "products" if any(word in name for word in PRODUCTS) else "rest"


@contextmanager
def added_by_autograd(apart: bool) -> Iterator[None]:
    """Inside, autograd adds up the gradients of what several LoRA layers read, if ``apart``."""
    if not apart:
        yield
        return
    with mock.patch.object(SharedInput, "serves", staticmethod(lambda _: False)):
        yield


def gpu_times(step: Step) -> dict[str, float]:
    """Milliseconds of a step's kernels, by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            step.run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in found.events() or ():
        if event.device_type == DeviceType.CUDA:
            times[kind_of(event.name)] += event.device_time / 1000 / PROFILED
    return dict(times)


def measure(device: str, trial: Trial) -> list[dict[str, Any]]:
    case = next(one for one in CASES if one.rank is not None)
    shape = SHAPES[case.shape]
    size = (trial.batch or shape.batch, trial.length or shape.length or 1)
    torch.manual_seed(0)
    ids = torch.randint(0, trial.vocabulary or 128256, size, device=device)
    inputs = ExampleInputs((), {"input_ids": ids})
    step = Step(made(case, "auto", trial, inputs, device), inputs, autocast=False)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS + 1):
        for apart, found in times.items():
            with added_by_autograd(apart):
                for _ in range(1 if turn else WARM_UP):
                    step.run()
                if turn:
                    found += [step.milliseconds() for _ in range(STEPS)]
    rows = []
    for apart, found in times.items():
        with added_by_autograd(apart):
            kinds = gpu_times(step) if device == "cuda" else {}
        row: dict[str, Any] = {"sums": "by autograd" if apart else "by the layers"}
        row |= {"step_ms": statistics.median(found), "kernels_ms": kinds}
        limit = kinds.get("products", 0.0) + kinds.get("attention", 0.0)
        row["step_to_limit"] = row["step_ms"] / limit if limit else None
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    for name in ("layers", "width", "vocabulary", "batch", "length"):
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    names = ("layers", "width", "vocabulary", "batch", "length")
    trial = Trial(**{name: getattr(arguments, name) for name in names})
    rows = measure(arguments.device, trial)
    for row in rows:
        kinds = ", ".join(f"{kind} {time:.1f}" for kind, time in sorted(row["kernels_ms"].items()))
        ratio = row["step_to_limit"]
        beside = "" if ratio is None else f"; {ratio:.3f} times products and attention"
        print(f"{row['sums']:13s} {row['step_ms']:8.1f} ms a step; kernels: {kinds}{beside}")
    if arguments.json:
        text = json.dumps({"environment": environment(arguments.device), "rows": rows}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
