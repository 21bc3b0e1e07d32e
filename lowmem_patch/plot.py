"""Pictures of saved bytes, and of memory against speed. The only importer of matplotlib and adjustText."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowmem_patch.constants import StepTable
from lowmem_patch.errors import ConfigError
from lowmem_patch.planning.names import unit_of
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.tables.fit import derivative_at, primitive_at
from lowmem_patch.tables.function import Curve
from lowmem_patch.tracing.categories import CATEGORIES

DPI = 150


def require_matplotlib() -> Any:
    """The class of matplotlib's figures, which needs no display.

    Raises:
        ConfigError: matplotlib or adjustText is not installed.
    """
    try:
        import adjustText  # noqa: F401 - used when labels are written, asked for before the work
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib and adjustText: pip install 'lowmem-patch[plot]'"
        ) from error
    return Figure


def plot_saved_bytes(reports: Mapping[str, PatchReport], path: Path) -> None:
    """Write a picture of models by their titles, one below the other; the ending of ``path`` (png, svg, pdf)
    decides its format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    size = (7, 1.6 + 2.6 * len(reports))
    figure = require_matplotlib()(figsize=size, dpi=DPI, layout="constrained")
    labels: dict[str, Any] = {}
    for row, (title, report) in enumerate(reports.items()):
        axes, kinds = figure.add_subplot(len(reports), 1, row + 1), report.kinds
        unit, scale = unit_of(max(report.saved_before, report.saved_after, report.floor))
        bars = {"before": kinds.before, "after": kinds.after, "floor": kinds.floor}
        stack_bars(axes, bars, scale, labels)
        axes.margins(x=0.15)
        axes.set_xlabel(f"saved activation bytes, {unit}")
        axes.set_title(title, fontsize="small", wrap=True)
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    write_picture(figure, path)


def stack_bars(
    axes: Any,
    bars: Mapping[str, Mapping[str, int]],
    scale: int,
    labels: dict[str, Any],
    **text: Any,
) -> None:
    """A bar for each name, stacked of its kinds of bytes (``tracing.categories.CATEGORIES``).

    Args:
        labels: gets one bar for each kind, for a legend.
        text: settings of the totals' texts.
    """
    below = [0.0] * len(bars)
    for number, kind in enumerate(CATEGORIES):
        sizes = [kinds.get(kind, 0) / scale for kinds in bars.values()]
        if any(sizes):
            labels[kind] = axes.barh(list(bars), sizes, left=below, color=f"C{number}")
            below = [left + size for left, size in zip(below, sizes, strict=True)]
    for row, total in enumerate(below):
        axes.text(total, row, f" {total:,.1f}", va="center", **text)
    axes.invert_yaxis()


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to train: its bytes, and the tokens, images or steps of a second."""

    label: str
    memory: float
    rate: float


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both memory and rate, the smallest memory first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory, -point.rate)):
        if not best or point.rate > best[-1].rate:
            best.append(point)
    return best


def plot_tradeoff(
    points: Sequence[Point], path: Path, title: str, *, memory: str, rate: str
) -> None:
    """Write memory against rate, one labelled point each; a line joins those that none beats in both.

    Args:
        memory, rate: labels of the axes, such as "peak above rest" and "tokens / s".

    Raises:
        ConfigError: as in :func:`plot_saved_bytes`.
    """
    figure = require_matplotlib()(figsize=(7, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    unit, scale = unit_of(max(point.memory for point in points))
    best = pareto(points)
    axes.plot([p.memory / scale for p in best], [p.rate for p in best], color="C0", alpha=0.5, lw=1)
    colors = ["C0" if point in best else "0.5" for point in points]
    axes.scatter([p.memory / scale for p in points], [p.rate for p in points], c=colors, zorder=3)
    axes.set_xlim(0, 1.15 * max(p.memory / scale for p in points))  # room for the labels
    axes.set_ylim(0, 1.15 * max(p.rate for p in points))
    axes.set_xlabel(f"{memory}, {unit}  (less is better)")
    axes.set_ylabel(f"{rate}  (more is better)")
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,.10g}")
    axes.set_title(title, fontsize="small", wrap=True)
    axes.grid(alpha=0.2)
    figure.draw_without_rendering()  # sizes are known only then, and must stay
    figure.set_layout_engine("none")
    labels = [
        (", ".join(p.label for p in near), near[0].memory / scale, near[0].rate, near[0] in best)
        for near in _together([*best, *(p for p in points if p not in best)])
    ]
    _label(axes, labels)
    write_picture(figure, path)


def _together(points: Sequence[Point]) -> list[list[Point]]:
    """Points that lie on each other, within a fiftieth of the largest values: they share one label."""
    memory, rate = (max(getattr(p, name) for p in points) / 50 for name in ("memory", "rate"))
    groups: list[list[Point]] = []
    for point in points:
        for group in groups:
            if (
                abs(group[0].memory - point.memory) < memory
                and abs(group[0].rate - point.rate) < rate
            ):
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def plot_step_table(name: str, curve: Curve, table: StepTable, path: Path) -> None:
    """Write an activation's derivative beside its steps, and below how far h~ is from the activation.

    Raises:
        ConfigError: as in :func:`plot_saved_bytes`.
    """
    figure = require_matplotlib()(figsize=(7, 4.2), dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    margin = 1 + 0.25 * (table.thresholds[-1] - table.thresholds[0])
    x = np.linspace(table.thresholds[0] - margin, table.thresholds[-1] + margin, 4001)
    step = 1e-5
    above.plot(x, (curve(x + step) - curve(x - step)) / (2 * step), color="C0", label="h'")
    above.step(x, derivative_at(table, x), color="C1", label=f"h~', {table.bits} bits")
    below.plot(x, curve(x) - primitive_at(table, curve, x), color="C1")
    below.set_ylabel("h - h~")
    below.set_xlabel("x")
    above.set_ylabel("derivative")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.2)
    integral = f"integral of (h - h~)^2: {table.squared_distance:.4g}"
    above.set_title(f"{name}: {integral}", fontsize="small", wrap=True)
    write_picture(figure, path)


def _label(axes: Any, labels: Sequence[tuple[str, float, float, bool]]) -> None:
    """Write each label beside its point, off other labels and points; a line leads to a far one."""
    from adjustText import adjust_text
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=3, foreground="white")]  # over the line that joins the best
    texts = [
        axes.text(
            x, y, text, fontsize="small", weight="bold" if best else "normal", path_effects=outline
        )
        for text, x, y, best in labels
    ]
    adjust_text(
        texts, [x for _, x, _, _ in labels], [y for _, _, y, _ in labels], ax=axes,
        expand=(1.2, 1.8), force_static=(0.2, 0.4), min_arrow_len=12, ensure_inside_axes=True,
        arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.5},
    )  # fmt: skip


def write_picture(figure: Any, path: Path) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error
