"""The floor of a model, item by item."""

from __future__ import annotations

import dataclasses
from collections import Counter

from lowmem_patch.planning.report import block_name
from lowmem_patch.tracing.categories import CATEGORIES


@dataclasses.dataclass(frozen=True)
class FloorItem:
    """One tensor that the rule allows.

    Attributes:
        module: the path of the module that needs it first.
        category: one of ``lowmem_patch.tracing.categories.CATEGORIES``.
        bytes: its size.
    """

    module: str
    category: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes that the rule allows, item by item."""

    items: tuple[FloorItem, ...]

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def by_kind(self) -> dict[str, int]:
        sizes = Counter(dict.fromkeys(CATEGORIES, 0))
        for item in self.items:
            sizes[item.category] += item.bytes
        return dict(sizes)

    @property
    def by_block(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for item in self.items:
            sizes[block_name(item.module)] += item.bytes
        return dict(sizes)
