"""Saved bytes against those of an older revision: ``python -m zoo.changes REVISION``.

Reads zoo/results at that revision of the repository, and writes docs/coverage-changes.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from zoo.store import LIBRARIES, load

PAGE = Path(__file__).parent.parent / "docs" / "coverage-changes.md"
_ROOT = Path(__file__).parent.parent

_HEAD = """# Coverage: saved bytes, then and now

This page is written by `python -m zoo.changes {revision}`. It compares the results in `zoo/results/`
with those of revision {revision}, in which `auto` still folded norms into Linears, and took codes wherever
they saved more. Bytes are those that autograd holds after the forward of the tiny models of
[coverage](coverage.md).

All models that were judged then and now, and in how many of them autograd holds fewer, equally many or
more bytes than then:

| preset | models | fewer | equal | more |
|---|---|---|---|---|
"""
_MORE = """
In these, `auto` holds more than then. It takes approximate codes only behind frozen Linears now (here all
weights train): only there have training runs shown what 3-bit codes cost
([training truth](training-truth.md)), and in convolutional nets errors added up. Codes of ReLU and its
kin are exact, and stay. `paper` still has all codes. Models that had no codes then hold at most
{percent:.1f} % more.

| model (preset) | strategies then | strategies now | bytes / unpatched then | now |
|---|---|---|---|---|
"""


def _rows_at(revision: str) -> dict[str, Any]:
    found = {}
    for library in LIBRARIES:
        text = subprocess.run(
            ["git", "show", f"{revision}:zoo/results/{library}.jsonl"],
            cwd=_ROOT, capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
        rows = (json.loads(line) for line in text.splitlines())
        found.update({row["name"]: row["presets"] for row in rows})
    return found


def _strategies(row: dict[str, Any]) -> str:
    used = {name: number for name, number in row["strategies"].items() if name != "keep"}
    return ", ".join(f"{number} {name}" for name, number in sorted(used.items())) or "none"


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The lines of both tables, from the presets' results by model."""
    counts, more, growth = [], [], []
    for preset in ("auto", "exact", "paper"):
        pairs = [
            (name, then[name][preset], now[name][preset])
            for name in now
            if then.get(name, {}).get(preset, {}).get("saved_after")
            and now[name].get(preset, {}).get("saved_after")
        ]
        moved = [
            (b["saved_after"] > a["saved_after"]) - (b["saved_after"] < a["saved_after"])
            for _, a, b in pairs
        ]
        counts.append(
            f"| {preset} | {len(pairs)} | {moved.count(-1)} | {moved.count(0)} | {moved.count(1)} |\n"
        )
        growth += [
            b["saved_after"] / a["saved_after"] - 1
            for _, a, b in pairs
            if "codes" not in a["strategies"]
        ]
        more += [
            f"| {name} ({preset}) | {_strategies(a)} | {_strategies(b)} | "
            f"{a['saved_after'] / a['saved_before']:.2f} | {b['saved_after'] / b['saved_before']:.2f} |\n"
            for (name, a, b), sign in zip(pairs, moved, strict=True)
            if sign == 1
        ]
    return [*counts, _MORE.format(percent=100 * max(growth)), *more]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zoo.changes", description=__doc__)
    parser.add_argument("revision", help="of git, with results to compare with")
    revision = parser.parse_args().revision
    now = {
        name: {preset: vars(row) for preset, row in result.presets.items()}
        for library in LIBRARIES
        for name, result in load(library).items()
    }
    lines = changes(_rows_at(revision), now)
    PAGE.write_text(_HEAD.format(revision=revision) + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
