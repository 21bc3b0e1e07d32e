"""Plain data: what is planned for, or was done to, each site of a model."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.tracing.saved_bytes import SavedBytes

__all__ = [
    "RECORD",
    "BytesByKind",
    "PatchReport",
    "Record",
    "Site",
    "block_name",
    "by_block",
    "find_records",
]

RECORD = "_lowmem_patch_record"  # where a patched model holds its own


@dataclasses.dataclass(frozen=True)
class BytesByKind:
    """Saved bytes by what they are kept for (``lowmem_patch.tracing.categories.CATEGORIES``)."""

    before: dict[str, int] = dataclasses.field(default_factory=dict)
    after: dict[str, int] = dataclasses.field(default_factory=dict)
    floor: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Site:
    """One norm or activation of the model.

    ``bytes_before`` and ``bytes_after`` count what autograd keeps for this site alone, for the
    example inputs of the plan: unique storages that the site's own op saves and no Linear does.
    """

    name: str
    kind: str  # layer_norm, rms_norm, gelu, gelu_tanh, silu, quick_gelu, relu_squared, or other
    strategy: str  # fold, share, codes, recompute, keep
    reason: str
    consumers: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    approximate: bool = False
    fold: FoldStep | None = None

    @property
    def patched(self) -> bool:
        return self.strategy != "keep"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class PatchReport:
    """What ``plan_patch`` would do, or ``patch_model`` did.

    Byte counts are saved activation bytes of one forward on the example inputs, unique storages,
    parameters and buffers excluded; low-precision copies of weights are reported apart. ``floor``
    holds the bytes that the rule of ``lowmem_patch.planning.floor`` allows, in all and by block. ``fit``
    says which blocks run again for a budget; the byte counts are those of blocks as patched.
    """

    model: str
    config: PatchConfig
    sites: tuple[Site, ...]
    inputs: str
    saved_before: int
    saved_after: int
    weight_copies_before: int = 0
    weight_copies_after: int = 0
    blocks: tuple[tuple[str, int, int], ...] = ()  # (block, bytes before, bytes after)
    notes: tuple[str, ...] = ()
    floor: int = 0
    floor_blocks: dict[str, int] = dataclasses.field(default_factory=dict)
    kinds: BytesByKind = dataclasses.field(default_factory=BytesByKind)
    fit: FitReport | None = None

    @property
    def above_floor(self) -> float:
        """Saved bytes after the patch, as a multiple of the floor; 0 where nothing need be saved."""
        return self.saved_after / self.floor if self.floor else 0.0

    @property
    def patched(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.patched)

    @property
    def left_alone(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if not site.patched)

    @property
    def approximate(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.approximate)

    @property
    def fold_steps(self) -> tuple[FoldStep, ...]:
        return tuple(
            site.fold for site in self.sites if site.strategy == "fold" and site.fold is not None
        )

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["config"] = self.config.to_dict()
        data["above_floor"] = self.above_floor
        return data

    def __str__(self) -> str:
        lines = [
            f"{self.model}: preset {self.config.name}, {len(self.patched)} of {len(self.sites)} sites patched"
        ]
        rows = [("site", "kind", "strategy", "bytes before", "after", "reason")]
        for site in self.sites:
            strategy = site.strategy + (" (approximate)" if site.approximate else "")
            before, after = f"{site.bytes_before:,}", f"{site.bytes_after:,}"
            rows.append((site.name, site.kind, strategy, before, after, site.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        if self.saved_before and self.saved_after:
            share = 100 * (1 - self.saved_after / self.saved_before)
            lines.append(
                f"saved activation bytes: {self.saved_before:,} -> {self.saved_after:,} "
                f"({share:.1f} % fewer) for {self.inputs}"
            )
        elif self.saved_before:
            lines.append(f"saved activation bytes: {self.saved_before:,} before, for {self.inputs}")
        if self.floor and self.saved_after:
            lines.append(f"floor: {self.floor:,} bytes; kept {self.above_floor:.3f} times that")
        if self.fit is not None:
            lines.append(str(self.fit))
        lines.extend(self.notes)
        return "\n".join(lines)


_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def block_name(module: str) -> str:
    """The repeated block that a module lies in: ``model.layers.3.mlp`` -> ``model.layers.3``.

    Nested stages keep both numbers (``layers.2.blocks.1``); a module outside any block is ``(rest)``.
    """
    match = _BLOCK.match(module)
    if match is None:
        return "(rest)"
    head, tail = match.group(1), module[match.end() :]
    nested = _BLOCK.match(tail)
    return f"{head}.{nested.group(1)}" if nested and nested.group(1).count(".") == 1 else head


def by_block(saved: SavedBytes) -> dict[str, int]:
    """Saved bytes by the block of the module that saved a storage first."""
    blocks: dict[str, int] = {}
    for module, size in saved.by_module.items():
        block = block_name(module)
        blocks[block] = blocks.get(block, 0) + size
    return blocks


@dataclasses.dataclass
class Record:
    """What ``patch_model`` leaves on the model, enough to report and to plan again.

    Attributes:
        signature: what trained at the patch, from ``trains_signature``.
        hook: the handle of the hook that refuses unfolded weights, where norms were folded.
        fit: the budget and the optimizer that were asked for.
    """

    report: PatchReport
    signature: int
    hook: Any = None
    fit: tuple[str | int, str] | None = None


def find_records(model: nn.Module) -> list[tuple[nn.Module, Record]]:
    """The records of this model and of modules inside it, with the modules that hold them."""
    return [(m, m.__dict__[RECORD]) for m in model.modules() if RECORD in m.__dict__]
