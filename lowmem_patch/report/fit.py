"""What makes a training step fit, and what was chosen for a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowmem_patch.memory import MemoryReport
from lowmem_patch.planning.columns import make_table
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.names import human_bytes, size_text
from lowmem_patch.planning.suggestions import Suggestion
from lowmem_patch.report.layout import NO_MORE_POSITIONS, print_line, print_table


def print_suggestions(suggestions: Sequence[Suggestion], limit: int, device: str) -> None:
    """Ways in which all blocks run, and what else would help; those that fit are bold."""
    ways = [suggestion for suggestion in suggestions if not suggestion.on_top]
    more = [suggestion for suggestion in suggestions if suggestion.on_top]
    _print_suggestions(f"to fit in {human_bytes(limit)}", ways, limit, ways[0].seconds)
    # where the patch alone fits, nobody needs more
    if more and ways[0].total > limit:
        heading = "the last row above, with one change more"
        _print_suggestions(heading, more, limit, ways[0].seconds)
    if len(ways) > 1:
        print_line(
            "a block that runs again saves its input alone and is recomputed in the backward (activation "
            "checkpointing); --fit recomputes as few blocks as the budget needs",
            style="dim",
        )
    print_line(
        "total: the peak above, and 3 % of what lies above the model states for fragmentation; if every "
        "block was run, and not a few for many equal ones, also a margin and what the allocator rounds up",
        style="dim",
    )
    print_line(
        f"step ms: predicted, of forward and backward of the blocks on {device}, FSDP without its "
        "communication; time: beside the first row",
        style="dim",
    )


def print_verdict(suggestions: Sequence[Suggestion], memory: MemoryReport) -> None:
    """One sentence: whether the step fits as it was asked for, and by what."""
    limit = memory.limit or 0
    size = human_bytes(limit)
    ways = [suggestion for suggestion in suggestions if not suggestion.on_top]
    more = [
        suggestion for suggestion in suggestions if suggestion.on_top and suggestion.total <= limit
    ]
    if ways[0].total <= limit:
        text = f"fits in {size}: patched, and no block needs to run again"
    elif any(suggestion.total <= limit for suggestion in ways):
        text = (
            f"fits in {size} where blocks run again, by this estimate: --fit chooses how few, or offloads "
            "what they save, in less time than these rows; it counts what the allocator rounds up as well"
        )
    elif more:
        names = "; ".join(suggestion.name for suggestion in more)
        before = (
            ", not even where all blocks run again; on top of that," if ways[1:] else " as asked;"
        )
        text = f"does not fit in {size}{before} each of these alone suffices: {names}"
    elif memory.largest_after:
        text = f"does not fit in {size}; the largest {memory.solved} is {memory.largest_after}"
    else:
        least = min(suggestions, key=lambda suggestion: suggestion.total)
        text = (
            f"nothing fits in {size}: the least of all rows above is {size_text(least.total, up=True)} "
            f"({least.name})"
        )
    print_line(text, style="bold")


def _print_suggestions(
    heading: str, suggestions: Sequence[Suggestion], limit: int, patched: float
) -> None:
    """Each suggestion with its total, and its time beside that of the patched step."""
    print_line("")
    columns = ("total", "fits", "step ms", "time")
    table = make_table(heading, *columns, right=columns)
    for suggestion in suggestions:
        fits = suggestion.total <= limit
        share = f"{suggestion.seconds / patched:.2f}x" if patched else "-"
        cells = (
            size_text(suggestion.total, up=True),
            "yes" if fits else "no",
            f"{1e3 * suggestion.seconds:.1f}",
            share,
        )
        table.add_row(suggestion.name, *cells, style="bold" if fits else None)
    print_table(table)


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
    print_line(
        "as patched, held: what these blocks hold when the forward ends, as patched and at their level, each "
        "tensor at the block that makes it; more ms: predicted, what the level adds to a step",
        style="dim",
    )
    for line in (*fit.head, *fit.notes):
        print_line(line.strip())


def print_largest(sizes: Mapping[str, int], fit: FitReport, positions: int | None) -> None:
    """The size that was looked for: the answer, behind all that explains it.

    ``positions``: of the model, above which no length was looked for.
    """
    for name, size in sizes.items():
        capped = name == "length" and size == positions
        about = NO_MORE_POSITIONS if capped else "a size 1 or 2 % larger may fit as well"
        print_line(
            f"largest {name} within {fit.asked}: {size} ({fit.inputs}); {about}", style="bold"
        )
