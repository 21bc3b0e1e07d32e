"""Bytes and names as people read them: units, and rows of repeated blocks as one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LARGE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
# in a path, also one within a sentence
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)|(?<= )\d+(?=\.[^\W\d])")


def human_bytes(count: int) -> str:
    """1024 bytes = 1 KiB; whole bytes below that."""
    power = min(max(abs(count).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.1f} {_UNITS[power]}" if power else f"{count} B"


def listed(names: Collection[str], most: int) -> str:
    """The first names of a list, and dots for the others."""
    return ", ".join(list(names)[:most]) + (", ..." if len(names) > most else "")


def size_text(size: int, *, up: bool = False) -> str:
    """``25769803776`` -> ``24.00 GiB``; ``up``: no text stands for less than ``size``."""
    name, unit = unit_of(size)
    if unit == 1:
        return f"{size} B"
    hundredths = -(-100 * size // unit) if up else round(100 * size / unit)
    return f"{hundredths / 100:.2f} {name}"


def unit_of(largest: float) -> tuple[str, int]:
    """The unit in which so many bytes are a number that people read, and its bytes."""
    return next((pair for pair in _LARGE_UNITS if largest >= pair[1]), ("bytes", 1))


def fewer(before: int, after: int) -> str:
    """The share that was saved, such as ``45.2 %``; ``-`` of nothing."""
    return f"{100 * (1 - after / before):.1f} %" if before else "-"


def fewer_or_more(before: int, after: int) -> str:
    """The same in words, such as ``45.2 % fewer``; of more bytes than before, ``45.2 % more``."""
    more = after > before
    share = fewer(before, 2 * before - after if more else after)
    return f"{share} {'more' if more else 'fewer'}"


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
