"""What the saved bytes of one block are: by kind, unpatched, with each preset, and the floor; any machine.

    python benchmarks/kinds.py --json benchmarks/results/saved-kinds.json

A block is the difference of three layers and two, at real widths, on fake tensors: nothing is computed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from models import CASES, Case

from lowmem_patch import PatchReport, plan_patch
from lowmem_patch.bench import environment
from lowmem_patch.tracing.categories import CATEGORIES
from lowmem_patch.tracing.example_inputs import make_example_inputs

CHOSEN = ("LLaMA-7B LoRA all, PEFT defaults", "LLaMA-7B full", "ViT-B/16 full")
ROWS = 2
PRESETS = ("paper", "exact", "auto")
Kinds = dict[str, int]


def plan(case: Case, preset: str, layers: int) -> PatchReport:
    with torch.device("meta"):
        model = case.shape.build(layers)
    model = case.adapt(model)
    inputs = make_example_inputs(model, batch_size=ROWS, sequence_length=case.shape.length)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.shape.autocast):
        return plan_patch(model, preset, example_inputs=inputs.kwargs or inputs.args)


def block_by_kind(case: Case) -> dict[str, Kinds]:
    """Bytes by variant and kind."""
    found: dict[str, Kinds] = {}
    for preset in PRESETS:
        three, two = (plan(case, preset, layers).kinds for layers in (3, 2))
        found.setdefault("unpatched", _less(three.before, two.before))
        found[preset] = _less(three.after, two.after)
        floor = _less(three.floor, two.floor)  # of the last preset: with its codes and its dtypes
    return {**found, "floor": floor}


def _less(more: Kinds, fewer: Kinds) -> Kinds:
    sizes = {kind: more.get(kind, 0) - fewer.get(kind, 0) for kind in CATEGORIES}
    return {kind: size for kind, size in sizes.items() if size}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = {case.name: block_by_kind(case) for case in CASES if case.name in CHOSEN}
    for name, variants in cases.items():
        print(f"{name}, {ROWS} rows")
        for variant, kinds in variants.items():
            parts = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in kinds.items())
            print(f"  {variant:10} {sum(kinds.values()) / 2**20:8.1f} MiB: {parts}")
    if options.json is not None:
        data = {"environment": environment("cpu"), "rows": ROWS, "cases": cases}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
