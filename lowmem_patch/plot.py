"""Saved bytes by kind as stacked bars: before, after, floor. The only importer of matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowmem_patch.errors import ConfigError
from lowmem_patch.kinds import KINDS
from lowmem_patch.patching.sites import PatchReport

__all__ = ["plot_saved_bytes", "require_matplotlib"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def require_matplotlib() -> Any:
    """The class of matplotlib's figures, which needs no display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'lowmem-patch[plot]'") from error
    return Figure


def plot_saved_bytes(report: PatchReport, path: Path, title: str) -> None:
    """Write the picture; the ending of ``path`` (png, svg, pdf) decides its format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = require_matplotlib()(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    bars = {"before": report.kinds.before, "after": report.kinds.after, "floor": report.kinds.floor}
    largest = max(report.saved_before, report.saved_after, report.floor, 1)
    unit, scale = next((pair for pair in _UNITS if largest >= pair[1]), ("bytes", 1))
    below = [0.0] * len(bars)
    for number, kind in enumerate(KINDS):
        sizes = [column.get(kind, 0) / scale for column in bars.values()]
        if any(sizes):
            axes.barh(list(bars), sizes, left=below, label=kind, color=f"C{number}")
            below = [left + size for left, size in zip(below, sizes, strict=True)]
    for row, total in enumerate(below):
        axes.text(total, row, f" {total:,.1f}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"saved activation bytes, {unit}")
    axes.set_title(title, fontsize="small", wrap=True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error
