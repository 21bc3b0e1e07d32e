"""Shared by all renderings: consoles and their width, errors, progress, and the form of tables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from lowmem_patch.planning.columns import FILE_WIDTH, Table, text_width, wrapped

NO_MORE_POSITIONS = (
    "the model has no more positions (max_position_embeddings), and longer rows may fit"
)

_spinning: list[Progress] = []  # on the terminal now, which has one cursor


def _console(stream: TextIO) -> Console:
    """A console for a stream; made anew each time, as the stream may have been redirected since."""
    stop_spinner()
    return Console(file=stream, width=text_width(stream) or FILE_WIDTH, highlight=False)


def print_line(text: str, style: str | None = None) -> None:
    """A sentence on standard output, wrapped at words to the width; never wrapped in a file."""
    for line in wrapped(text, text_width()):
        _console(sys.stdout).print(line, style=style, markup=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """A table of :func:`make_table` on standard output, and its footnotes."""
    for line in table.lines(text_width()):
        _console(sys.stdout).print(line.text, style=line.style, markup=False, soft_wrap=True)


def print_error(message: str, *, lines: bool = False) -> None:
    """One line on standard error, never wrapped; ``lines``: those of the message."""
    text = message if lines else " ".join(message.split())
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
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=None)

        def tell(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield tell


@contextlib.contextmanager
def spinner(text: str | None) -> Iterator[None]:
    """``text`` and the seconds on standard error, where that is a terminal, until something else is shown."""
    if text is None or not sys.stderr.isatty():
        yield
        return
    console = _console(sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        display.add_task(text, total=None)
        _spinning.append(display)
        try:
            yield
        finally:
            stop_spinner()


def stop_spinner() -> None:
    """Clear the line of a spinner, before anything is printed."""
    while _spinning:
        _spinning.pop().stop()
