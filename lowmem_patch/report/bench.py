"""Training variants side by side: memory, step time and throughput."""

from __future__ import annotations

from lowmem_patch.bench import Comparison, Row
from lowmem_patch.planning.columns import make_table
from lowmem_patch.planning.names import human_bytes
from lowmem_patch.report.layout import print_line, print_table

# Of a step; below this share of kernels the host decides how long it takes.
_BUSY = 0.9


def print_bench(comparison: Comparison, title: str) -> None:
    """One line for each variant, also where it failed or was skipped; shares are of the first."""
    print_line(f"{title}; device: {comparison.device}")
    first = comparison.rows[0]
    on_gpu = any(row.peak is not None for row in comparison.rows)
    peaks = ["peak", "reserved"] if on_gpu else []  # the CPU's allocator counts nothing
    kernels = ["kernels ms"] if on_gpu else []
    rate = f"{comparison.unit} / s"
    numbers = ["act", "share", *peaks, *kernels, "step ms", "quartiles", "share of time", rate]
    table = make_table("variant", *numbers, "why", right=numbers)
    for row in comparison.rows:
        if row.measured:
            table.add_row(row.name, *_cells(row, first, on_gpu, comparison.work))
        else:
            why = f"failed: {row.failed}" if row.failed else f"skipped: {row.skipped}"
            style = "red" if row.failed else "dim"
            table.add_row(row.name, note=why, style=style)
    print_table(table)
    notes = [
        f"a step is forward, loss, backward and fused AdamW of {comparison.work} {comparison.unit}; "
        f"shares are of {first.name}; medians of {comparison.rounds} x "
        f"{comparison.steps} steps, the variants in turn",
        "bytes are above what lies on the device between steps: weights and optimizer"
        if on_gpu
        else "act is what autograd holds",
    ]
    if comparison.parked:
        notes.append("the models that waited lay in the host's memory, for lack of room")
    print_line("; ".join(notes), style="dim")
    _print_waits(comparison)


def _print_waits(comparison: Comparison) -> None:
    """Which steps wait for the host, whose times say little about the GPU."""
    busy = {row.name: row.busy for row in comparison.rows if row.measured}
    waiting = {name: share for name, share in busy.items() if share is not None and share < _BUSY}
    if waiting:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in waiting.items())
        print_line(
            f"the GPU waits for Python: kernels run in a part of these steps alone ({shares}). A larger "
            "batch, for which there is memory now, or torch.compile makes Python count for less, and a CUDA "
            "graph (torch.cuda.make_graphed_callables) leaves it out"
        )


def _cells(row: Row, first: Row, on_gpu: bool, work: int) -> list[str]:
    low, median, high = row.quartiles
    share = f"{row.act / first.act:.2f}x" if row.act is not None and first.act else "-"
    time = f"{median / first.quartiles[1]:.2f}x" if first.measured else "-"
    sizes = [row.act, row.peak, row.reserved] if on_gpu else [row.act]
    act, *peaks = ["-" if size is None else human_bytes(size) for size in sizes]
    kernels = ["-" if row.kernels is None else f"{row.kernels:.2f}"] if on_gpu else []
    times = [
        *kernels,
        f"{median:.2f}",
        f"{low:.2f} .. {high:.2f}",
        time,
        f"{1000 * work / median:,.0f}",
    ]
    return [act, share, *peaks, *times]
