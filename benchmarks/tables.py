"""Write the README's tables from the committed results, so that every number there has its data file.

python benchmarks/tables.py            # rewrite the tables in README.md
python benchmarks/tables.py --check    # exit 1 if README.md does not show the committed results
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return data


def _environment(data: dict[str, Any]) -> str:
    environment = dict(data["environment"])
    machine, date = environment.pop("machine"), environment.pop("date")
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    return f"{machine}, {date}; {versions}."


def bytes_table() -> str:
    """Saved activation bytes of one block, as shares of unpatched."""
    data = _load("saved-bytes.json")
    rows = [
        "| saved bytes of one block, and what is left of them | unpatched | `paper` | `exact` | `auto` |",
        "|---|---|---|---|---|",
    ]
    parts = data.get("parts", {})
    for case, variants in data["cases"].items():
        whole = variants["unpatched"]["block"]
        cells = [f"{whole / 2**20:.1f} MiB"]
        cells += [f"{variants[p]['block'] / whole:.1%}" for p in ("paper", "exact", "auto")]
        rows.append(f"| {_named(case, parts)} | {' | '.join(cells)} |")
    command = "python benchmarks/models.py --json benchmarks/results/saved-bytes.json"
    return "\n".join(
        [
            *rows,
            "",
            f"`{command}`: {_environment(data)}",
        ]
    )


def _named(case: str, parts: dict[str, str]) -> str:
    """The case with the part of its model that was run."""
    return f"{case} ({parts[case]})" if case in parts else case


_COLUMNS = (
    "unpatched",
    "paper",
    "exact",
    "auto",
    "lomem",
    "liger",
    "checkpointing",
    "compile",
    "auto+compile",
)


def _step(row: dict[str, Any]) -> str:
    """The step's median, with its spread where that is more than a twentieth of it."""
    median, spread = row["step_ms"], row["step_spread_ms"]
    return f"{median:.1f} ± {spread:.1f}" if spread > 0.05 * median else f"{median:.1f}"


def gpu_table(name: str) -> str:
    """act / peak+ / step on the GPU."""
    data = _load(name)
    shown = [c for c in _COLUMNS if any(c in variants for variants in data["cases"].values())]
    rows = [
        "| act MiB / peak MiB / step ms | " + " | ".join(shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for case, variants in data["cases"].items():
        cells = []
        for column in shown:
            row = variants.get(column)
            if row is None or "error" in row:
                cells.append("")
            else:
                cells.append(f"{row['act_mib']:.0f} / {row['peak_mib']:.0f} / {_step(row)}")
        rows.append(f"| {_named(case, data.get('parts', {}))} | {' | '.join(cells)} |")
    command = f"python benchmarks/models.py --device cuda --json benchmarks/results/{name}"
    return "\n".join([*rows, "", f"`{command}`: {_environment(data)}"])


def whole_table(name: str) -> str:
    """Step peak, its prediction, time and rate of whole steps."""
    data = _load(name)
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
            rows.append(f"| {variant} | {peak} | {said} | {_step(row)} | {rate} |")
        rows.append("")
    command = f"python benchmarks/whole.py --json benchmarks/results/{name}"
    return "\n".join([*rows, f"`{command}`: {_environment(data)}"])


TABLES = {
    "bytes": bytes_table,
    "whole": partial(whole_table, "whole-h200.json"),
    "gpu": partial(gpu_table, "models-h200.json"),
    "gpu-earlier": partial(gpu_table, "models-h200-earlier.json"),
}


def render(text: str) -> str:
    """README text with each marked table replaced."""
    for name, table in TABLES.items():
        if f"<!-- {name} -->" not in text:
            continue
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        rendered = table() + "\n"
        text = pattern.sub(lambda match, new=rendered: match[1] + new + match[2], text)
    return text


def main() -> int:
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = render(before)
    if "--check" in sys.argv:
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
