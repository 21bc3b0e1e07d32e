"""Tables that are whole at any width: numbers are never cut, and names are shortened in the middle.

Where a table is too wide, its headers and words wrap first, then a prefix that all names share goes into the
header, then names are shortened, and at last its columns stand in several tables below each other.
Explanations stand below the table as footnotes, each once.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence

from rich.table import Table as RichTable

__all__ = ["Column", "Table", "shortened", "wrapped"]

_GAP = 2  # spaces between columns
_SHORTEST_NAME = 16
_DOTS = "..."
_FIRST = (
    "name",
    "words",
    "number",
)  # who gets more room; numbers are whole, and only their headers wrap


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
    def natural(self) -> int:
        return max(len(line) for text in (self.header, *self.cells) for line in text.split("\n"))

    @property
    def least(self) -> int:
        header = max(map(len, self.header.split()), default=0)
        lines = [line for cell in self.cells for line in cell.split("\n")]
        if self.kind == "name":
            return _shortest(lines)
        if self.kind == "words":
            lines = [word for line in lines for word in line.split()]
        return max([header, *map(len, lines)])


class Table:
    """Rows of texts with a heading, and footnotes."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)
        self.styles: list[str | None] = []
        self.footnotes: dict[str, int] = {}

    def add_row(self, *cells: str, note: str = "", style: str | None = None) -> None:
        """``note`` explains the row, below the table; its number stands in the last column."""
        mark = ""
        if note:
            mark = f"[{self.footnotes.setdefault(note, len(self.footnotes) + 1)}]"
        full = [*cells, *[""] * (len(self.columns) - len(cells))]
        if mark:
            full[-1] = f"{full[-1]} {mark}".strip()
        for column, cell in zip(self.columns, full, strict=True):
            column.cells.append(cell)
        self.styles.append(style)

    def rendered(self, width: int) -> list[RichTable]:
        """One table, or several below each other, none wider than ``width``."""
        columns = self.columns
        if _total(column.natural for column in columns) > width:
            columns = [_without_prefix(column) for column in columns]
        return [_drawn(part, self.styles, width) for part in _parts(columns, width)]

    def notes(self, width: int | None) -> list[str]:
        """The footnotes as lines."""
        return [
            line
            for text, number in self.footnotes.items()
            for line in wrapped(f"[{number}] {text}", width, indent="    ")
        ]


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
    lines = [line for cell in column.cells for line in cell.split("\n")]
    if column.kind != "name" or len(lines) < 2:
        return column
    paths = [line.split(" ")[0].split(".") for line in lines]
    common = 0
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        # a number says nothing without the name before it
        if len(set(parts)) > 1 or any(path[common + 1][0] in "{0123456789" for path in paths):
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
    """Of each column: at least its least, and more as far as there is room, names first."""
    widths = [column.least for column in columns]
    room = width - _total(widths)
    for i in sorted(range(len(columns)), key=lambda i: _FIRST.index(columns[i].kind)):
        more = min(room, columns[i].natural - widths[i])
        if more > 0:
            widths[i] += more
            room -= more
    return widths


def _drawn(columns: list[Column], styles: list[str | None], width: int) -> RichTable:
    table = RichTable(
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, _GAP, 0, 0),
        collapse_padding=True,
    )
    widths = _widths(columns, width)
    for column, size in zip(columns, widths, strict=True):
        header = textwrap.wrap(column.header, size, break_long_words=False, break_on_hyphens=False)
        table.add_column(
            "\n".join(shortened(line, size) for line in header),
            justify="right" if column.kind == "number" else "left",
            width=size,
            no_wrap=column.kind != "words",
            overflow="fold",
        )
    for row, style in enumerate(styles):
        if columns[0].cells[row] and not any(column.cells[row] for column in columns[1:]):
            continue
        cells = []
        for column, size in zip(columns, widths, strict=True):
            cell = column.cells[row]
            if column.kind == "name":
                cell = "\n".join(_fitted(line, size) for line in cell.split("\n"))
            cells.append(cell)
        table.add_row(*cells, style=style)
    return table
