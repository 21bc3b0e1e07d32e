"""Draw every picture of the documents from the committed results: python benchmarks/picture.py

docs/pareto.png           a whole step: peak memory against tokens per second
docs/training-truth.png   learning curves of the training runs, and their differences
docs/pictures/*.png       the blocks alone, saved bytes, step tables
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import truth_report

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.plot import (
    Point,
    plot_step_table,
    plot_tradeoff,
    plot_variant_kinds,
    plot_variants,
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
    shown = ("unpatched", "liger", "auto+checkpointing")
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
