"""Whole steps as tables and sentences: for `tables.py`, and what all tables are made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return data


def environment_of(data: dict[str, Any]) -> str:
    environment = dict(data["environment"])
    machine, date = environment.pop("machine"), environment.pop("date")
    step = environment.pop("step", "")
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    return f"{machine}, {date}; {versions}{step and f'; a step is {step}'}."


def with_source(rows: list[str], command: str, data: dict[str, Any]) -> str:
    """A table, and below it the command that measured it, with machine, date and versions."""
    return "\n".join([*rows, "", f"`{command}`: {environment_of(data)}"])


def step_of(row: dict[str, Any]) -> str:
    """The step's median, with its spread where that is more than a twentieth of it."""
    median, spread = row["step_ms"], row["step_spread_ms"]
    return f"{median:.1f} ± {spread:.1f}" if spread > 0.05 * median else f"{median:.1f}"


def whole_table(name: str, options: str = "") -> str:
    """Step peak, its prediction, time and rate of whole steps; ``options`` are those of the command."""
    data = load(name)
    rows = []
    for case, variants in data["cases"].items():
        rows += [
            f"**{case}**",
            "",
            "| variant | step peak MiB | predicted | step ms | tokens/s |",
            "|---|---|---|---|---|",
        ]
        for variant, row in variants.items():
            if "error" in row:
                rows.append(f"| {variant} | {row['error']} | | | |")
                continue
            peak, said = (
                "" if row[key] is None else f"{row[key]:,.0f}"
                for key in ("step_peak_mib", "predicted_mib")
            )
            rate = f"{row['tokens_per_second']:,.0f}"
            rows.append(f"| {variant} | {peak} | {said} | {step_of(row)} | {rate} |")
        rows.append("")
    command = f"python benchmarks/whole.py {options}--json benchmarks/results/{name}"
    return "\n".join([*rows, f"`{command}`: {environment_of(data)}"])


# in the summary
SHOWN = (
    "unpatched", "liger", "unsloth", "exact", "auto", "unsloth+checkpointing", "auto+checkpointing",
)  # fmt: skip
_HEADLINE_CASE = "Llama-3.1-8B LoRA all, 2 x 4096 tokens"


def headline(name: str, of_bf16: str) -> str:
    """The first sentences of the README: memory and speed of a whole step, beside the unpatched one; and the
    same with bf16 adapters, of one row of tokens."""
    data = load(name)
    variants = next(v for case, v in data["cases"].items() if case.startswith(_HEADLINE_CASE))
    stock, patched = variants["unpatched"], variants["auto"]
    before, after = (row["step_peak_mib"] / 1024 for row in (stock, patched))
    speed = patched["tokens_per_second"] / stock["tokens_per_second"]
    exact = variants["exact"]["tokens_per_second"] / stock["tokens_per_second"]
    machine = data["environment"]["machine"]
    return (
        f"**A training step of Llama-3.1-8B with LoRA takes {after:.1f} GiB instead of {before:.1f} GiB, "
        f"and it is {speed:.2f} times\nas fast.** The numbers are peaks of GPU memory above the weights and "
        "the optimizer's states. The step has head, loss and\noptimizer; it reads 2 x 4096 tokens on one "
        f"{machine}. The adapters are float32, as PEFT makes them by default. "
        f"`auto` computes them in bf16;\n`exact` does not, and its step is {exact:.2f} times as fast.\n"
        f"{_with_bf16_adapters(of_bf16)}"
    )


def _with_bf16_adapters(name: str) -> str:
    rows = {row["variant"]: row for row in load(name)["rows"] if row["case"].startswith("bf16")}
    stock, patched = rows["unpatched"], rows["auto"]
    share = patched["bytes_per_token"] / stock["bytes_per_token"]
    speed = stock["ms_per_token"] / patched["ms_per_token"]
    return (
        f"With bf16 adapters the gain is smaller: a step takes {100 * share:.0f} % of the unpatched "
        "step's memory per token, "
        f"and it is {speed:.2f} times as fast\n([table](docs/benchmarks.md#the-longest-sequence))."
    )


def summary_table(name: str) -> str:
    """Whole steps in five rows: peak and rate, and both beside the unpatched model's."""
    data = load(name)
    rows = ["| training | model | step peak, GiB | tokens / s |", "|---|---|---|---|"]
    for case, variants in data["cases"].items():
        stock = variants["unpatched"]
        for variant in SHOWN:
            row = variants.get(variant)
            if row is None or "error" in row:
                continue
            peak, rate = row["step_peak_mib"] / 1024, row["tokens_per_second"]
            less = f" ({row['step_peak_mib'] / stock['step_peak_mib']:.0%})"
            more = f" ({rate / stock['tokens_per_second']:.2f} x)"
            spread = row["step_spread_ms"] / row["step_ms"]
            if variant == "unpatched":
                less = more = ""
            if spread > 0.05:
                more += f", ± {spread:.0%}"
            rows.append(
                f"| {case.partition(' (')[0]} | {variant} | {peak:.1f}{less} | {rate:,.0f}{more} |"
            )
    command = f"python benchmarks/whole.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def limit_table(name: str) -> str:
    """A step beside its products and attention; LoRA layers or autograd add up gradients."""
    data = load(name)
    rows = [
        "| gradients of one input are added | step ms | products | attention | others | step / limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        parts = (f"{row['kernels_ms'][kind]:.1f}" for kind in ("products", "attention", "rest"))
        cells = (row["sums"], f"{row['step_ms']:.1f}", *parts, f"{row['step_to_limit']:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    command = f"python benchmarks/limit.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)
