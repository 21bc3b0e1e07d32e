"""Plain data: what is planned for, or was done to, each site of a model."""

from __future__ import annotations

import dataclasses
import html
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import ConfigError
from lowmem_patch.planning.columns import Table, make_table, text_width, wrapped
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.names import (
    collapse_names,
    fewer_or_more,
    human_bytes,
    pattern_of,
    starred,
)
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.tracing.saved_bytes import SavedBytes

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
    kind: str  # what it is, as layer_norm, gelu, batch_norm, linear, attention, chain, or other
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


class SiteRow(NamedTuple):
    """Sites of equal kind, strategy, reason and bytes.

    Attributes:
        names: paths, with ``{0..3}`` for their numbers.
        before, after: bytes of each site.
    """

    names: tuple[str, ...]
    kind: str
    strategy: str
    before: int
    after: int
    reason: str


NOTHING_TRAINS = (
    "no parameter trains, so autograd saves nothing, and a patch can save no memory: call get_peft_model for "
    "LoRA, or model.requires_grad_(True) for all weights, and then patch_model(model) again"
)
_HEADERS = ("site", "kind", "strategy", "before", "after", "reason")


@dataclasses.dataclass(frozen=True)
class PatchReport:
    """What ``plan_patch`` would do, or ``patch_model`` did.

    Byte counts are saved activation bytes of one forward on the example inputs, unique storages,
    parameters and buffers excluded; low-precision copies of weights are reported apart. ``floor``
    holds the bytes that the rule of ``lowmem_patch.planning.floor`` allows, in all and by block. ``fit``
    says which blocks run again for a budget; the byte counts are those of blocks as patched. ``applied``:
    the model was patched so, and not only planned.
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
    applied: bool = dataclasses.field(default=False, compare=False)

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

    def to_dataframe(self) -> Any:
        """One row a site, as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("a data frame needs pandas: pip install pandas") from error
        columns = [field.name for field in dataclasses.fields(Site) if field.name != "fold"]
        rows = [[getattr(site, name) for name in columns] for site in self.sites]
        return pandas.DataFrame(rows, columns=columns)

    def site_rows(self) -> list[SiteRow]:
        """Sites that differ in the numbers of their paths alone are one row; patched ones come first.

        So are reasons: where several differ in such numbers alone, each row has the reason of them all.
        """
        reasons: dict[str, set[str]] = {}
        for site in self.sites:
            reasons.setdefault(starred(site.reason), set()).add(site.reason)
        groups: dict[tuple[object, ...], list[Site]] = {}
        for site in (*self.patched, *self.left_alone):
            key = (
                site.strategy, site.kind, pattern_of(site.name), starred(site.reason),
                site.approximate, site.bytes_before, site.bytes_after,
            )  # fmt: skip
            groups.setdefault(key, []).append(site)
        rows = []
        for sites in groups.values():
            first, several = sites[0], len(sites) > 1
            common = starred(first.reason)
            strategy = first.strategy + (" (approximate)" if first.approximate else "")
            names = collapse_names([site.name for site in sites])
            rows.append(
                SiteRow(
                    tuple(f"{name} (each)" if several else name for name in names), first.kind,
                    strategy, first.bytes_before, first.bytes_after,
                    first.reason if len(reasons[common]) == 1 else common,
                )
            )  # fmt: skip
        return rows

    def _summary(self) -> list[str]:
        """Sentences behind the table."""
        lines = []
        if self.saved_before and self.saved_after:
            lines.append(
                f"saved activation bytes: {human_bytes(self.saved_before)} -> "
                f"{human_bytes(self.saved_after)} ({fewer_or_more(self.saved_before, self.saved_after)}) "
                f"for {self.inputs}"
            )
            lines += self._elsewhere() or self._no_gain()
        elif self.saved_before:
            lines.append(
                f"saved activation bytes: {human_bytes(self.saved_before)} before, for {self.inputs}"
            )
        if self.floor and self.saved_after:
            lines.append(
                f"floor: {human_bytes(self.floor)}; what is saved is {self.above_floor:.3f} times that"
            )
        fitted = [str(self.fit)] if self.fit is not None else []
        return [*lines, *fitted, *self.notes, *self.about_gradients]

    @property
    def about_gradients(self) -> list[str]:
        """Whether gradients are exact, in one line; none where nothing trains."""
        if NOTHING_TRAINS in self.notes:
            return []
        if not self.approximate:
            return ["gradients: exact up to rounding, no site is approximate"]
        stored = [site for site in self.approximate if site.strategy == "eight_bit"]
        steps = [site for site in self.approximate if site not in stored]
        parts = []
        if steps:
            kinds = ", ".join(sorted({site.kind for site in steps}))
            keep = (
                f"activations ({kinds}) keep" if len(steps) > 1 else f"activation ({kinds}) keeps"
            )
            parts.append(f"{len(steps)} {keep} codes of {self.config.bits} bits")
        if stored:
            several = (
                "Linears and attentions store" if len(stored) > 1 else "Linear or attention stores"
            )
            parts.append(
                f"{len(stored)} {several} in 8 bits what the backward reads, also that of norms and "
                "activations in front"
            )
        number = len(self.approximate)
        return [
            f"gradients: approximate at {number} site{'s' if number > 1 else ''}: {' and '.join(parts)}; "
            "every other gradient formula is exact"
        ]

    def _no_gain(self) -> list[str]:
        """That a patch is of no use for such inputs, as where the head of a frozen model trains alone."""
        if self.saved_after < self.saved_before or not self.patched:
            return []
        reached = any(site.bytes_before for site in self.patched)
        why = ": no gradient passes through the patched sites, and autograd saves nothing there"
        return [f"the patch saves no memory for such inputs{'' if reached else why}"]

    def _elsewhere(self) -> list[str]:
        """How much less modules save that have no row."""
        fewer_at_sites = sum(site.bytes_before - site.bytes_after for site in self.sites)
        rest = self.saved_before - self.saved_after - fewer_at_sites
        if rest <= 0 or fewer_at_sites <= 0:
            return []
        return [
            f"the sites save {human_bytes(fewer_at_sites)} less, modules that are not in the table "
            f"{human_bytes(rest)}: Linears, adapters, attention, the head"
        ]

    @property
    def _title(self) -> str:
        done = "patched" if self.applied else "would be patched"
        sites = f"{len(self.patched)} of {len(self.sites)} sites {done}"
        if NOTHING_TRAINS in self.notes:
            sites += ", but no parameter trains"
        return f"{self.model}: preset {self.config.name}, {sites}"

    def site_table(self) -> Table:
        """The sites as both the command line and ``print`` show them; reasons are footnotes."""
        *headers, _ = _HEADERS
        table = make_table(*headers, "why", right=("before", "after"))
        for names, kind, strategy, before, after, reason in self.site_rows():
            sizes = (human_bytes(before), human_bytes(after))
            table.add_row("\n".join(names), kind, strategy, *sizes, note=reason)
        return table

    @property
    def about_sites(self) -> str:
        """What the numbers of :meth:`site_table` are."""
        text = (
            "a site is a place that may be patched, such as a norm or an activation; bytes are for "
            f"{self.inputs}, and a tensor that a Linear saves as well counts with the Linear"
        )
        if any(site.strategy == "eight_bit" for site in self.sites):
            text += "; the 8 bits of what several Linears read count with the norm in front of them"
        if any(s.strategy == "recompute" and s.bytes_before == s.bytes_after for s in self.sites):
            text += (
                "; a recomputed site whose bytes stay equal saves memory elsewhere: the module that reads "
                "its output no longer saves it"
            )
        return text

    def __str__(self) -> str:
        """As wide as the terminal (or COLUMNS)."""
        width = text_width()
        table = [line.text for line in self.site_table().lines(width)]
        sentences = "\n".join([self.about_sites, *self._summary()]).splitlines()
        rest = [line for sentence in sentences for line in wrapped(sentence, width)]
        return "\n".join([*wrapped(self._title, width), *table, *rest])

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{name}</th>" for name in _HEADERS)
        body = "".join(
            f"<tr><td>{'<br>'.join(map(html.escape, row.names))}</td><td>{row.kind}</td>"
            f"<td>{row.strategy}</td><td>{human_bytes(row.before)}</td>"
            f"<td>{human_bytes(row.after)}</td><td>{html.escape(row.reason)}</td></tr>"
            for row in self.site_rows()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in self._summary())
        return f"<p><b>{html.escape(self._title)}</b></p>{table}{rest}"


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
    blocks: Counter[str] = Counter()
    for module, size in saved.by_module.items():
        blocks[block_name(module)] += size
    return dict(blocks)


def block_rows(
    before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[tuple[str, int, int], ...]:
    """Each block with its bytes before and after."""
    return tuple(
        (block, before.get(block, 0), after.get(block, 0)) for block in {**before, **after}
    )


@dataclasses.dataclass(frozen=True)
class AsPatched:
    """Facts of a model right after the patch; names alone, so that it travels with every copy.

    Attributes:
        trains: parameters outside adapters, and whether they trained.
        replaced: modules that were replaced.
        forwards: what the forward was of the modules that were replaced, of those that call them, and of
            adapter layers and attention modules that got a forward of ours.
        adapters: the plan sees to adapter layers.
        folded: the Linears into which norms were folded.
    """

    trains: dict[str, bool]
    replaced: tuple[str, ...]
    forwards: dict[str, str]
    adapters: bool
    folded: tuple[str, ...] = ()


@dataclasses.dataclass(eq=False)
class Record:
    """What ``patch_model`` leaves on the model, enough to report and to plan again.

    Attributes:
        signature: what trained at the patch, from ``trains_signature``.
        fit: the budget as it was asked for, and the ``Training`` that it is for.
        as_patched: what is compared with the model later.
    """

    report: PatchReport
    signature: int
    fit: tuple[str | int, Any] | None = None
    as_patched: AsPatched | None = None


def find_records(model: nn.Module) -> list[tuple[nn.Module, Record]]:
    """The records of this model and of modules inside it, with the modules that hold them."""
    return [(m, m.__dict__[RECORD]) for m in model.modules() if RECORD in m.__dict__]
