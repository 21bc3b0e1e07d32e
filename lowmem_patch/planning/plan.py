"""Decide what is done to each site of a model: every strategy is asked, the first to claim a site has it.

Facts come from the trace (who reads what), from the modules (what they compute) and from the parameters (what
trains); a model's name plays no part. Nothing is touched.
"""

from __future__ import annotations

import dataclasses
import zlib

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.planning.report import Site
from lowmem_patch.strategies import STRATEGIES
from lowmem_patch.strategies.fold import FoldedNorm
from lowmem_patch.strategies.protocol import Facts, Patch
from lowmem_patch.strategies.swap import Swap


@dataclasses.dataclass(frozen=True)
class Plan:
    """What shall be done to a model.

    Attributes:
        sites: the rows of a report, in the order of the forward.
        patches: in the order in which they are carried out.
        notes: sentences of a report.
    """

    sites: tuple[Site, ...]
    patches: tuple[Patch, ...]
    notes: tuple[str, ...] = ()

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the modules that are replaced."""
        swaps = (patch for patch in self.patches if isinstance(patch, Swap))
        return tuple(patch.site for patch in swaps if patch.function is None)

    @property
    def folded(self) -> tuple[FoldedNorm, ...]:
        return tuple(patch for patch in self.patches if isinstance(patch, FoldedNorm))


def make_plan(facts: Facts, config: PatchConfig) -> Plan:
    """Ask every strategy. One module is replaced once; hooks and forwards may be added to any."""
    patches: list[Patch] = []
    rows: dict[str, Site] = {}
    notes: list[str] = []
    replaced: set[str] = set()
    for strategy in STRATEGIES:
        found = strategy.find(facts, config)
        for patch in found.patches:
            if isinstance(patch, Swap):
                if patch.site in replaced:
                    continue
                replaced.add(patch.site)
            patches.append(patch)
            if patch.kind is not None:
                rows[patch.site] = _row(facts, patch, patch.kind)
        for skip in found.skips:
            saved = facts.saved(skip.site)
            row = Site(skip.site, skip.kind, "keep", skip.reason, skip.consumers, saved, saved)
            rows.setdefault(skip.site, row)
        notes += found.notes
    sites = tuple(sorted(rows.values(), key=lambda row: facts.calls_of(row.name)[0].last_op))
    return Plan(sites, tuple(patches), tuple(notes))


def _row(facts: Facts, patch: Patch, kind: str) -> Site:
    step = patch.step if isinstance(patch, FoldedNorm) else None
    # what a module saves is counted; a function has none of its own
    after = patch.saves if isinstance(patch, Swap) and patch.function is not None else 0
    return Site(
        patch.site, kind, patch.strategy, patch.reason, patch.consumers, facts.saved(patch.site), after,
        patch.approximate, step,
    )  # fmt: skip


def trains_signature(model: nn.Module) -> int:
    """A number that changes when what trains, or the model's structure, changes; the same in any process."""
    facts = [(name, p.requires_grad, str(p.dtype)) for name, p in model.named_parameters()]
    return zlib.crc32(repr(facts).encode())
