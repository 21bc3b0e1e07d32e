"""Step tables, as text."""

from __future__ import annotations

from collections.abc import Mapping

from lowmem_patch.constants import STEP_BITS, StepTable
from lowmem_patch.planning.columns import make_table
from lowmem_patch.report.layout import print_line, print_table


def print_step_table(name: str, table: StepTable) -> None:
    """The steps of one table, and how far it is from its activation."""
    print_line(
        f"{name}: {table.bits} bits an element" if table.bits > 1 else f"{name}: 1 bit an element"
    )
    columns = ("code", "from x", "to x", "derivative")
    rows = make_table(*columns, right=columns)
    edges = ("-inf", *(f"{threshold:.7g}" for threshold in table.thresholds), "inf")
    levels = (*table.levels, table.levels[0]) if table.cyclic else table.levels
    for number, (level, low, high) in enumerate(zip(levels, edges[:-1], edges[1:], strict=True)):
        rows.add_row(str(number % len(table.levels)), low, high, f"{level:.7g}")
    print_table(rows)
    if table.exact:
        print_line("exact: the activation's own derivative takes these values")
        return
    print_line(f"integral of (h - h~)^2: {table.squared_distance:.7g}")
    print_line(f"largest difference of h and h~: {table.largest_difference:.4g}")
    print_line(
        "of the mean derivative over standard normal x, the error is at most "
        f"{table.mean_derivative_bound:.3g}"
    )


def print_step_tables(kinds: Mapping[str, Mapping[int, StepTable]]) -> None:
    """The integral of (h - h~)^2 for each activation and number of bits."""
    columns = tuple(f"{bits} bit{'s' * (bits > 1)}" for bits in STEP_BITS)
    rows = make_table("integral of (h - h~)^2", *columns, right=columns)
    for kind, tables in kinds.items():
        cells = ("exact" if t.exact else f"{t.squared_distance:.3g}" for t in tables.values())
        rows.add_row(kind, *cells)
    print_table(rows)
