"""Find the step tables of `lowmem_patch/step_tables.json` again, and write the page that lists their errors.

python scripts/derive_step_tables.py            # fit all tables (a minute, needs scipy), write both files
python scripts/derive_step_tables.py --page     # write docs/step-tables.md from the committed tables
python scripts/derive_step_tables.py --check    # exit 1 if the page does not show the committed tables
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "lowmem_patch" / "step_tables.json"
PAGE = ROOT / "docs" / "step-tables.md"
BEGIN, END = "<!-- tables -->", "<!-- /tables -->"


def derive() -> dict[str, dict[str, Any]]:
    """A row for each activation and number of bits; none for an activation that has no table."""
    from lowmem_patch.constants import ACTIVATION_KINDS, STEP_BITS
    from lowmem_patch.errors import FitError
    from lowmem_patch.tables import fit_step_table

    kinds: dict[str, dict[str, Any]] = {}
    for kind in ACTIVATION_KINDS:
        try:
            tables = {str(bits): fit_step_table(kind, bits) for bits in STEP_BITS}
        except FitError as error:
            print(error, file=sys.stderr)
            continue
        kinds[kind] = {bits: dataclasses.asdict(table) for bits, table in tables.items()}
        print(kind, *(f"{table.squared_distance:.5g}" for table in tables.values()))
    return kinds


def as_text(kinds: dict[str, dict[str, Any]]) -> str:
    """JSON with one line for each list of numbers."""
    parts = []
    for kind, rows in kinds.items():
        lines = [f'  "{bits}": {json.dumps(row)}' for bits, row in rows.items()]
        parts.append(f' "{kind}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def derivative_error(kind: str, row: dict[str, Any]) -> float:
    """The root mean square of h' - h~' over standard normal x."""
    import torch

    from lowmem_patch import formulas

    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    levels = torch.tensor((*row["levels"], row["levels"][0]), dtype=torch.float64)
    steps = levels[torch.bucketize(x, torch.tensor(row["thresholds"], dtype=torch.float64))]
    slopes = formulas.BACKWARD[kind](torch.ones_like(x), x)  # type: ignore[index]  # a kind by name
    density = torch.exp(-x.square() / 2)
    return float(((slopes - steps).square() * density).sum() / density.sum()) ** 0.5


def tables_of(kinds: dict[str, dict[str, Any]]) -> str:
    """The tables of the page; to each row its error is added."""
    columns = [f"{bits} bit{'s' * (bits > 1)}" for bits in (1, 2, 3, 4)]
    for kind, rows in kinds.items():
        for row in rows.values():
            row["error"] = derivative_error(kind, row)
    found = []
    for title, key in (
        ("integral of (h - h~)^2", "squared_distance"),
        ("largest difference of h and h~", "largest_difference"),
        ("root mean square of h' - h~' for standard normal x", "error"),
    ):
        lines = [f"| {title} | {' | '.join(columns)} |", "|---" * 5 + "|"]
        for kind, rows in kinds.items():
            cells = [
                f"{row[key]:.3g}" if row["squared_distance"] else "exact" for row in rows.values()
            ]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        found.append("\n".join(lines))
    return "\n\n".join(found)


def page(kinds: dict[str, dict[str, Any]]) -> str:
    """The page with its tables written anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{tables_of(kinds)}\n{END}{behind}"


def page_is_current() -> bool:
    """Whether the page shows the committed tables."""
    kinds = json.loads(DATA.read_text(encoding="utf-8"))
    return page(kinds) == PAGE.read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--check", action="store_true", help="compare the page; write nothing")
    arguments = parser.parse_args()
    if not (arguments.page or arguments.check):
        DATA.write_text(as_text(derive()), encoding="utf-8")
    if arguments.check:
        return int(not page_is_current())
    kinds = json.loads(DATA.read_text(encoding="utf-8"))
    PAGE.write_text(page(kinds), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
