"""What every rendering shares: consoles, errors, progress, and how bytes, names and tables look."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

__all__ = [
    "collapse_names",
    "error_console",
    "fewer",
    "human_bytes",
    "make_table",
    "pattern_of",
    "print_error",
    "print_title",
    "progress_bar",
    "starred",
    "stdout_console",
]

# wide enough for a module path beside its reason where output is not a terminal
_PIPE_WIDTH = 140
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def stdout_console() -> Console:
    """For results. Made anew each time: standard output may have been redirected since."""
    return Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False
    )


def error_console() -> Console:
    """For everything that is not a result."""
    return Console(
        file=sys.stderr, width=None if sys.stderr.isatty() else _PIPE_WIDTH, highlight=False
    )


def print_error(message: str) -> None:
    """One line on standard error, never wrapped."""
    text = " ".join(message.split())
    error_console().print(f"error: {text}", style="red", markup=False, soft_wrap=True)


def print_title(text: str) -> None:
    """A heading between the parts of a longer output."""
    stdout_console().rule(text, align="left", style="dim")


@contextlib.contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on standard error; yields a callback ``(what, done, total)``. No bar when not a terminal."""
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = error_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell


def human_bytes(count: int) -> str:
    """1024 bytes = 1 KiB; whole bytes below that."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def fewer(before: int, after: int) -> str:
    return f"{100 * (1 - after / before):.1f} %" if before else "-"


def pattern_of(text: str) -> str:
    return _NUMBER.sub("{}", text)


def collapse_names(names: Sequence[str]) -> list[str]:
    """``["layers.0.norm", "layers.1.norm"]`` -> ``["layers.{0..1}.norm"]``; others stay apart."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(tuple(int(n) for n in _NUMBER.findall(name)))
    collapsed = []
    for pattern, numbers in groups.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        # only a full grid of numbers may be written as ranges; else something would be claimed too much
        if sorted(numbers) == sorted(itertools.product(*columns)):
            collapsed.append(pattern.format(*map(_ranges, columns)))
        else:
            by_head: dict[tuple[int, ...], list[int]] = {}
            for *head, last in numbers:
                by_head.setdefault(tuple(head), []).append(last)
            collapsed += [
                pattern.format(*head, _ranges(sorted(lasts))) for head, lasts in by_head.items()
            ]
    return collapsed


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``{0..2,5}``; a single number stays bare."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}")
    return parts[0] if len(numbers) == 1 else "{" + ",".join(parts) + "}"


def starred(text: str) -> str:
    return _NUMBER.sub("*", text)


def make_table(*headers: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    numeric = set(right)
    for header in headers:
        # the first column names things, and the last one explains: only that one may wrap
        last = header == headers[-1] and header not in numeric
        table.add_column(
            header,
            justify="right" if header in numeric else "left",
            no_wrap=not last,
            overflow="fold",
        )
    return table
