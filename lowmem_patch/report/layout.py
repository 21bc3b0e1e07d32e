"""Shared by all renderings: consoles, errors, progress, and the form of bytes, names and tables."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

__all__ = [
    "collapse_names",
    "fewer",
    "group_by_pattern",
    "human_bytes",
    "make_table",
    "pattern_of",
    "print_error",
    "print_line",
    "print_table",
    "print_title",
    "progress_bar",
    "starred",
]

# wide enough for a module path beside its reason where output is not a terminal
_PIPE_WIDTH = 140
_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def _console(stream: TextIO) -> Console:
    """A console for a stream; made anew each time, as the stream may have been redirected since."""
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_line(text: str, style: str | None = None) -> None:
    """One line on standard output, never wrapped."""
    _console(sys.stdout).print(text, style=style, markup=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """A table of :func:`make_table` on standard output."""
    _console(sys.stdout).print(table, markup=False)


def print_error(message: str) -> None:
    """One line on standard error, never wrapped."""
    text = " ".join(message.split())
    _console(sys.stderr).print(f"error: {text}", style="red", markup=False, soft_wrap=True)


def print_title(text: str) -> None:
    """A heading between the parts of a longer output."""
    _console(sys.stdout).rule(text, align="left", style="dim")


@contextlib.contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on standard error; yields a callback ``(label, done, total)``. No bar when not a terminal."""
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = _console(sys.stderr)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def tell(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield tell


def human_bytes(count: int) -> str:
    """1024 bytes = 1 KiB; whole bytes below that."""
    unit, name = pick_unit_and_suffix(abs(count), _UNITS, 1024)
    return f"{count} B" if unit == 1 else f"{count / unit:.1f} {name}"


def fewer(before: int, after: int) -> str:
    """The share that was saved, such as ``45.2 %``; ``-`` of nothing."""
    return f"{100 * (1 - after / before):.1f} %" if before else "-"


def pattern_of(text: str) -> str:
    """The name with ``{}`` for each number in its path."""
    return _NUMBER.sub("{}", text)


def group_by_pattern(
    rows: Iterable[tuple[str, tuple[int, ...]]],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Rows of equal sizes whose names differ in numbers alone as one row: its label and the sizes."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, sizes in rows:
        groups.setdefault((pattern_of(name), sizes), []).append(name)
    for (_, sizes), names in groups.items():
        for name in collapse_names(names):
            yield (f"{name} (each)" if len(names) > 1 else name), sizes


def collapse_names(names: Sequence[str]) -> list[str]:
    """``["layers.0.norm", "layers.1.norm"]`` -> ``["layers.{0..1}.norm"]``; others stay apart."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(tuple(int(n) for n in _NUMBER.findall(name)))
    collapsed = []
    for pattern, numbers in groups.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        # ranges name a full grid of numbers: with any other set they would name absent modules
        if sorted(numbers) == sorted(itertools.product(*columns)):
            collapsed.append(pattern.format(*map(_ranges, columns)))
        else:
            last_numbers: dict[tuple[int, ...], list[int]] = {}
            for *first, last in numbers:
                last_numbers.setdefault(tuple(first), []).append(last)
            collapsed += [
                pattern.format(*first, _ranges(sorted(lasts)))
                for first, lasts in last_numbers.items()
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
    """The text with ``*`` for each number in a path."""
    return _NUMBER.sub("*", text)


def make_table(*headers: str, right: Iterable[str] = ()) -> Table:
    """A table without borders; the columns named in ``right`` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    numeric = set(right)
    for header in headers:
        # only the last column, an explanation, may wrap
        last = header == headers[-1] and header not in numeric
        table.add_column(
            header,
            justify="right" if header in numeric else "left",
            no_wrap=not last,
            overflow="fold",
        )
    return table
