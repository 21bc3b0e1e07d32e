"""Draw every picture of the documents from the committed results: python benchmarks/picture.py

docs/pareto.png           a whole step: peak memory against tokens per second
docs/training-truth.png   learning curves of the training runs, and their differences
docs/pictures/*.png       the blocks alone, saved bytes, step tables
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import truth_report

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.planning.names import unit_of
from lowmem_patch.plot import (
    DPI,
    Point,
    plot_step_table,
    plot_tradeoff,
    require_matplotlib,
    stack_bars,
    write_picture,
)
from lowmem_patch.tables.function import make_curve

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

WHOLE = "Llama-3.1-8B LoRA all, 2 x 4096 tokens (all 32 layers of Llama-3.1-8B, with its head)"
TOKENS = 2 * 4096
# case of models-h200.json, file, title: which layers of which model were run, on how much data
BLOCKS = (
    (
        "LLaMA-7B LoRA all, PEFT defaults",
        "blocks-llama-7b.png",
        "4 of the 32 layers of LLaMA-7B, bf16, float32 LoRA on all Linears, 4 x 2048 tokens",
    ),
    (
        "ViT-B/16 full",
        "blocks-vit-b.png",
        "The 12 blocks of ViT-B/16, all weights train, autocast bf16, 128 images",
    ),
)


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return data


def whole_step(path: Path) -> None:
    data = _load("whole-h200.json")
    points = [
        Point(name, row["step_peak_mib"] * 2**20, row["tokens_per_second"])
        for name, row in data["cases"][WHOLE].items()
        if "error" not in row
    ]
    title = f"Llama-3.1-8B, 32 layers and head, bf16, LoRA on all Linears, 2 x 4096 tokens, {_machine(data)}"
    plot_tradeoff(
        points, path, title,
        memory="peak memory of a step above weights and optimizer", rate="tokens / s",
    )  # fmt: skip


def budgets(path: Path) -> None:
    """The step of `whole_step`, within budgets."""
    data = _load("fit-h200.json")
    shown = ("unpatched", "liger", "unsloth", "unsloth+checkpointing", "auto+checkpointing")
    whole = _load("whole-h200.json")["cases"][WHOLE]
    points = [
        Point(name, whole[name]["step_peak_mib"] * 2**20, whole[name]["tokens_per_second"])
        for name in shown
    ]
    for row in data["rows"]:
        if "error" not in row:
            limited = row["asked_mib"] < 10**6
            name = f"fit, {row['asked_mib'] / 1024:.1f} GiB" if limited else "auto"
            points.append(Point(name, row["measured_mib"] * 2**20, TOKENS / row["step_ms"] * 1000))
    title = f"Llama-3.1-8B, 32 layers and head, bf16, LoRA on all Linears, 2 x 4096 tokens, {_machine(data)}"
    plot_tradeoff(
        points, path, title,
        memory="peak memory of a step above weights and optimizer", rate="tokens / s",
    )  # fmt: skip


def blocks(folder: Path) -> None:
    data = _load("models-h200.json")
    for case, file, title in BLOCKS:
        points = [
            Point(name, row["peak_mib"] * 2**20, 1000 / row["step_ms"])
            for name, row in data["cases"][case].items()
            if "error" not in row
        ]
        plot_tradeoff(
            points, folder / file, f"{title}, {_machine(data)}",
            memory="peak memory of forward and backward above weights", rate="steps / s",
        )  # fmt: skip


def saved_bytes(path: Path) -> None:
    cases = _load("saved-bytes.json")["cases"]
    rows = {
        case: {name: row["block"] for name, row in variants.items()}
        for case, variants in cases.items()
    }
    plot_variants(
        rows, path, "Saved activation bytes of one block, real widths",
        whole="unpatched",
    )  # fmt: skip


def kinds(path: Path) -> None:
    data = _load("saved-kinds.json")
    title = f"Saved activation bytes of one block by kind, {data['rows']} rows of tokens or images"
    plot_variant_kinds(data["cases"], path, title)


def plot_variants(
    rows: Mapping[str, Mapping[str, int]], path: Path, title: str, *, whole: str
) -> None:
    """Write a group of bars for each row: bytes of each variant, as percent of the variant ``whole``.

    Args:
        rows: name of a row -> name of a variant -> bytes.
    """
    size = (7, 1.4 + 0.42 * len(rows))
    figure = require_matplotlib()(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    variants = [name for name in next(iter(rows.values())) if name != whole]
    height = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        shares = [100 * row[variant] / row[whole] for row in rows.values()]
        places = [row + (number - (len(variants) - 1) / 2) * height for row in range(len(rows))]
        axes.barh(places, shares, height, label=variant, color=f"C{number}")
        for place, share in zip(places, shares, strict=True):
            axes.text(share, place, f" {share:.0f}", va="center", fontsize="x-small")
    names = [f"{name}\n({row[whole] / 2**20:,.0f} MiB {whole})" for name, row in rows.items()]
    axes.set_yticks(range(len(rows)), names, fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel(f"% of {whole}  (less is better)")
    axes.set_title(title, fontsize="small", wrap=True)
    figure.legend(loc="outside lower center", ncols=len(variants), frameon=False)
    write_picture(figure, path)


def plot_variant_kinds(
    cases: Mapping[str, Mapping[str, Mapping[str, int]]], path: Path, title: str
) -> None:
    """Write a panel for each case: a bar for each variant, stacked of its kinds of bytes.

    Args:
        cases: name of a case -> name of a variant -> kind of bytes -> bytes.
    """
    size = (7, 1.4 + 1.6 * len(cases))
    figure = require_matplotlib()(figsize=size, dpi=DPI, layout="constrained")
    labels: dict[str, Any] = {}
    panels = figure.subplots(len(cases), squeeze=False)[:, 0]
    for axes, (case, variants) in zip(panels, cases.items(), strict=True):
        largest = max(sum(kinds.values()) for kinds in variants.values())
        unit, scale = unit_of(largest // 10)  # two digits at least before the point
        stack_bars(axes, variants, scale, labels, fontsize="x-small")
        axes.set_xlim(0, 1.1 * largest / scale)
        axes.set_xlabel(f"saved activation bytes, {unit}  (less is better)", fontsize="small")
        axes.set_title(case, fontsize="small")
        axes.tick_params(labelsize="small")
    figure.suptitle(title, fontsize="small")
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False,
        fontsize="small",
    )  # fmt: skip
    write_picture(figure, path)


def step_tables(folder: Path) -> None:
    curve = make_curve("gelu")
    for bits in (2, 3):
        plot_step_table("GELU", curve, STEP_TABLES["gelu"][bits], folder / f"gelu-{bits}-bits.png")


def _machine(data: dict[str, Any]) -> str:
    return f"one {data['environment']['machine']}"


def main(folder: Path) -> None:
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    whole_step(folder / "pareto.png")
    truth_report.draw(
        truth_report.load(RESULTS / "truth-h200.jsonl"), folder / truth_report.PICTURE.name
    )
    budgets(pictures / "budgets.png")
    blocks(pictures)
    saved_bytes(pictures / "saved-bytes.png")
    kinds(pictures / "saved-kinds.png")
    step_tables(pictures)


if __name__ == "__main__":
    main(ROOT / "docs")
