"""Tables that are whole at any width: numbers are never cut, and names are shortened in the middle.

Where a table is too wide, its headers and words wrap first, then a prefix that all names share goes into the
header, then names are shortened, and at last its columns stand in several tables below each other.
Explanations stand below the table as footnotes, each once.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import textwrap
from collections.abc import Iterable
from typing import NamedTuple, TextIO

FILE_WIDTH = 100  # of a table where output is no terminal and COLUMNS says nothing; whole names may take more

_GAP = 2  # spaces between columns
_SHORTEST_NAME = 16
_DOTS = "..."
# who gets more room; numbers are whole, and only their headers wrap
_FIRST = ("name", "words", "number")


class Line(NamedTuple):
    """One line of a table, and the style of its row: bold, dim, red or none."""

    text: str
    style: str | None = None


@dataclasses.dataclass
class Column:
    """One column.

    Attributes:
        header: its words may stand below each other.
        kind: ``name`` may be shortened in the middle, ``words`` may wrap at spaces, ``number`` stays whole.
        cells: one text a row; a name's may have several lines.
    """

    header: str
    kind: str
    cells: list[str] = dataclasses.field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [line for cell in self.cells for line in cell.split("\n")]

    @property
    def natural(self) -> int:
        return max(map(len, (*self.header.split("\n"), *self.lines)))

    @property
    def least(self) -> int:
        if self.kind == "name":
            return _shortest(self.lines)
        words = [word for line in self.lines for word in line.split()]
        texts = words if self.kind == "words" else self.lines
        return max(map(len, (*self.header.split(), *texts)), default=0)


@dataclasses.dataclass
class Table:
    """Rows of texts with a heading, and footnotes."""

    columns: list[Column]
    styles: list[str | None] = dataclasses.field(default_factory=list)
    footnotes: dict[str, int] = dataclasses.field(default_factory=dict)

    def add_row(self, *cells: str, note: str = "", style: str | None = None) -> None:
        """``note`` explains the row, below the table; its number stands in the last column."""
        full = [*cells, *[""] * (len(self.columns) - len(cells))]
        if note:
            mark = self.footnotes.setdefault(note, len(self.footnotes) + 1)
            full[-1] = f"{full[-1]} [{mark}]".strip()
        for column, cell in zip(self.columns, full, strict=True):
            column.cells.append(cell)
        self.styles.append(style)

    def lines(self, width: int | None) -> list[Line]:
        """One table, or several below each other, none wider than ``width``; and the footnotes.

        Where there is no width, as in a file, names are whole, and a footnote is one line.
        """
        whole = _total(c.natural if c.kind == "name" else c.least for c in self.columns)
        columns, room = self.columns, width or max(FILE_WIDTH, whole)
        if _total(column.natural for column in columns) > room:
            columns = [_without_prefix(column) for column in columns]
        lines: list[Line] = []
        for part in _parts(columns, room):
            lines += [*([Line("")] if lines else []), *_drawn(part, self.styles, room)]
        for text, number in self.footnotes.items():
            note = wrapped(f"[{number}] {text}", width, indent="    ")
            lines += [Line(line, "dim") for line in note]
        return lines


def make_table(*headers: str, right: Iterable[str] = (), names: Iterable[str] = ()) -> Table:
    """A table without borders.

    Args:
        right: columns of numbers, which are never cut.
        names: columns beside the first whose texts may be shortened; all others wrap at spaces.
    """
    numbers, shortens = set(right), {headers[0], *names}
    kinds = ("number" if h in numbers else "name" if h in shortens else "words" for h in headers)
    return Table([Column(header, kind) for header, kind in zip(headers, kinds, strict=True)])


def text_width(stream: TextIO | None = None) -> int | None:
    """COLUMNS, or the width of the terminal that a stream (default: standard output) is.

    None for a file, whose lines have no end.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    stream = sys.stdout if stream is None else stream
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):  # a stream of its own, which is no file of the system
        return None


def wrapped(text: str, width: int | None, *, indent: str = "  ") -> list[str]:
    """Lines of at most ``width`` characters, or the text as it is where there is no width."""
    if width is None or len(text) <= width:
        return [text]
    indent += " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def shortened(name: str, width: int) -> str:
    """The beginning and the end of a name that is longer than ``width``; the end says more."""
    if len(name) <= width:
        return name
    rest = max(width - len(_DOTS), 1)
    head = rest // 3
    return name[:head] + _DOTS + name[len(name) - (rest - head) :]


def _fitted(label: str, width: int) -> str:
    """A path shortened in the middle, or a label of words on several lines."""
    if len(label) > width and " " in label and "." not in label:
        label = "\n".join(textwrap.wrap(label, width, break_on_hyphens=False))
    return shortened(label, width) if "\n" not in label else label


def _shortest(names: list[str]) -> int:
    """The width at which names are still told apart."""
    longest, distinct = max(map(len, names), default=0), len(set(names))
    widths = range(min(_SHORTEST_NAME, longest), longest)
    return next((w for w in widths if len({_fitted(n, w) for n in names}) == distinct), longest)


def _total(widths: Iterable[int]) -> int:
    sizes = list(widths)
    return sum(sizes) + _GAP * (len(sizes) - 1)


def _without_prefix(column: Column) -> Column:
    """A column of module paths whose common beginning stands in the header."""
    if column.kind != "name" or len(column.lines) < 2:
        return column
    paths = [line.split(" ")[0].split(".") for line in column.lines]
    common = 0
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        # a number says nothing without the name before it
        if len(set(parts)) > 1 or any(path[common + 1][:1] in "{0123456789" for path in paths):
            break
        common += 1
    if not common:
        return column
    prefix = ".".join(paths[0][:common]) + "."
    cells = [
        "\n".join(line.removeprefix(prefix) for line in cell.split("\n")) for cell in column.cells
    ]
    return Column(f"{column.header} in {prefix[:-1]}", column.kind, cells)


def _parts(columns: list[Column], width: int) -> list[list[Column]]:
    """The columns in as many groups as needed, each behind the first column."""
    first, *others = columns
    parts = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _total(c.least for c in (*parts[-1], column)) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _widths(columns: list[Column], width: int) -> list[int]:
    """The width of each column: at least its least, and more as far as there is room, names first."""
    widths = [column.least for column in columns]
    room = width - _total(widths)
    for i in sorted(range(len(columns)), key=lambda i: _FIRST.index(columns[i].kind)):
        more = min(room, columns[i].natural - widths[i])
        if more > 0:
            widths[i] += more
            room -= more
    return widths


def _drawn(columns: list[Column], styles: list[str | None], width: int) -> list[Line]:
    widths = _widths(columns, width)
    header = [
        [shortened(line, size) for line in wrapped_words(column.header, size)]
        for column, size in zip(columns, widths, strict=True)
    ]
    tallest = max(map(len, header))
    header = [[""] * (tallest - len(cell)) + cell for cell in header]
    lines = _row(header, columns, widths, "bold")
    for row, style in enumerate(styles):
        if columns[0].cells[row] and not any(column.cells[row] for column in columns[1:]):
            continue
        cells = [
            _cell(column, column.cells[row], size)
            for column, size in zip(columns, widths, strict=True)
        ]
        lines += _row(cells, columns, widths, style)
    return lines


def _cell(column: Column, text: str, width: int) -> list[str]:
    """The lines of a cell."""
    lines = text.split("\n")
    if column.kind == "name":
        return [part for line in lines for part in _fitted(line, width).split("\n")]
    return [part for line in lines for part in (wrapped_words(line, width) or [""])]


def wrapped_words(text: str, width: int) -> list[str]:
    """Lines of whole words."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _row(
    cells: list[list[str]], columns: list[Column], widths: list[int], style: str | None
) -> list[Line]:
    """Cells of one or several lines side by side, numbers to the right."""
    lines = []
    for texts in itertools.zip_longest(*cells, fillvalue=""):
        padded = (
            text.rjust(width) if column.kind == "number" else text.ljust(width)
            for text, column, width in zip(texts, columns, widths, strict=True)
        )
        lines.append(Line((" " * _GAP).join(padded).rstrip(), style))
    return lines
