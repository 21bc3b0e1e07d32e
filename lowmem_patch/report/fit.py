"""What makes a training step fit, and what was chosen for a budget."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_patch.planning.columns import make_table
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.ladder import Rung
from lowmem_patch.planning.names import human_bytes
from lowmem_patch.report.layout import print_line, print_table

__all__ = ["print_fit", "print_ladder"]


def print_ladder(rungs: Sequence[Rung], limit: int, device: str) -> None:
    """Each rung with its total and its time; those that fit are bold."""
    print_line("")
    columns = ("total", "fits", "step ms", "time")
    table = make_table(f"to fit in {human_bytes(limit)}", *columns, right=columns)
    for rung in rungs:
        fits = rung.total <= limit
        share = f"{rung.seconds / rungs[0].seconds:.2f}x" if rungs[0].seconds else "-"
        cells = (
            human_bytes(rung.total),
            "yes" if fits else "no",
            f"{1e3 * rung.seconds:.1f}",
            share,
        )
        table.add_row(rung.name, *cells, style="bold" if fits else None)
    print_table(table)
    print_line(
        f"step ms: predicted, of forward and backward of the blocks on {device}; FSDP without its "
        "communication. From the last way to run blocks again on, each row stands alone on top of that one. "
        "--fit finds the least slow mix",
        style="dim",
    )


def print_fit(fit: FitReport) -> None:
    """Levels of the blocks, the predicted peak and the predicted time."""
    print_line("")
    columns = ("blocks", "as patched", "held", "more ms")
    table = make_table(f"fit {fit.asked}", *columns, right=columns)
    for level, count in fit.levels.items():
        blocks = [block for block in fit.blocks if block.level == level]
        sizes = (sum(block.patched for block in blocks), sum(block.held for block in blocks))
        seconds = sum(block.seconds for block in blocks)
        table.add_row(level, str(count), *map(human_bytes, sizes), f"{1e3 * seconds:.1f}")
    print_table(table)
    for line in (*fit.head, *fit.notes):
        print_line(line.strip())
