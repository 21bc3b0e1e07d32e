"""The loss head alone on a GPU: hidden rows times a vocabulary, mean cross entropy, and all gradients.

    python benchmarks/head.py                        # one GPU; peers take part when importable
    python benchmarks/head.py --json results.json

``extra`` is the peak above the resting level of a step, less the gradient of the weight where it trains;
``limit`` are the bare products. Medians of the steps of one process, the variants in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.bench import environment
from lowmem_patch.functional import Head, Labels, linear_cross_entropy

ROWS = 8192
SHAPES = {"Llama-3.1-8B": (4096, 128256), "Qwen2.5-0.5B": (896, 151936)}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A head: ``[rows, width]`` times ``[vocabulary, width]``."""

    shape: str
    rows: int
    width: int
    vocabulary: int
    trains: bool


def float32_logits(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As transformers computes a causal model's loss."""
    return F.cross_entropy((x @ weight.t()).float(), labels)


def chunked(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    head = Head(x, weight, None, None, None, 1.0, 0.0, x.dtype, x.dtype)
    return linear_cross_entropy(head, Labels(labels))


def peers() -> dict[str, Loss]:
    """Fused heads of other packages that are installed."""
    found: dict[str, Loss] = {}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )
    except ImportError:
        pass
    else:

        def liger(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            loss: Any = LigerFusedLinearCrossEntropyFunction.apply(x, weight, labels)
            result: Tensor = loss[0] if isinstance(loss, tuple) else loss
            return result

        found["liger"] = liger
    try:
        from cut_cross_entropy import linear_cross_entropy as cut
    except ImportError:
        pass
    else:
        found["cut-cross-entropy"] = lambda x, weight, labels: cut(x, weight, labels)
    return found


def products(case: Case, x: Tensor, weight: Tensor) -> float:
    """Milliseconds of the bare products."""
    out = x.new_empty(case.rows, case.vocabulary)

    def run() -> None:
        torch.mm(x, weight.t(), out=out)
        torch.mm(out, weight)
        if case.trains:
            torch.mm(out.t(), x)

    return statistics.median(timed(run) for _ in range(8))


def timed(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def measure(case: Case, losses: dict[str, Loss], steps: int) -> list[dict[str, Any]]:
    """A row for each way to compute the loss."""
    torch.manual_seed(0)
    x = (torch.randn(case.rows, case.width, device="cuda") * 0.5).bfloat16().requires_grad_()
    weight = (torch.randn(case.vocabulary, case.width, device="cuda") * 0.02).bfloat16()
    weight.requires_grad_(case.trains)
    labels = torch.randint(0, case.vocabulary, (case.rows,), device="cuda")
    limit = products(case, x.detach(), weight.detach())
    rows = [{**case._asdict(), "variant": "limit", "ms": limit}]

    def step(loss_of: Loss) -> Tensor:
        loss = loss_of(x, weight, labels)
        loss.backward()
        x.grad = weight.grad = None
        return loss.detach()

    times: dict[str, list[float]] = {name: [] for name in losses}
    for name, loss_of in losses.items():
        for _ in range(2):
            value = step(loss_of)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss_of)
        extra = torch.cuda.max_memory_allocated() - before
        if case.trains:
            extra -= weight.numel() * weight.element_size()
        rows.append(
            {**case._asdict(), "variant": name, "extra_mib": extra / 2**20, "loss": value.item()}
        )
    for _ in range(steps):
        for name, loss_of in losses.items():
            times[name].append(timed(lambda loss_of=loss_of: step(loss_of)))
    for row in rows[1:]:
        row["ms"] = statistics.median(times[str(row["variant"])])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    losses: dict[str, Loss] = {"float32 logits": float32_logits, "chunked": chunked, **peers()}
    rows: list[dict[str, Any]] = []
    for shape, (width, vocabulary) in SHAPES.items():
        for trains in (False, True):
            found = measure(Case(shape, ROWS, width, vocabulary, trains), losses, arguments.steps)
            print(f"{shape}, {ROWS} x {width} x {vocabulary}, {'trained' if trains else 'frozen'}")
            for row in found:
                extra = f"{row['extra_mib']:8.0f} MiB" if "extra_mib" in row else ""
                print(f"  {row['variant']:20} {row['ms']:7.2f} ms {extra}", flush=True)
            rows += found
    if arguments.json:
        data = {"environment": environment("cuda"), "rows": rows}
        arguments.json.write_text(json.dumps(data, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
