"""Decide what is done to each site of a model, carry that out on it, all or nothing, and undo it.

Every strategy is asked, and the first to claim a site has it. Facts come from the trace (who reads what), the
modules (what they compute) and the parameters (what trains); a model's name plays no part.
"""

from __future__ import annotations

import dataclasses
import zlib

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import PatchError
from lowmem_patch.nn.own import remove_own
from lowmem_patch.planning.report import Site
from lowmem_patch.strategies import STRATEGIES
from lowmem_patch.strategies.fold import FoldedNorm, folded_now, refuse_lost_linears, unfold
from lowmem_patch.strategies.protocol import Facts, Patch, Target
from lowmem_patch.strategies.swap import Swap, put_back


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


def apply_plan(model: nn.Module, plan: Plan, *, arithmetic: bool = True) -> None:
    """Carry out every patch of a plan, in place.

    Args:
        arithmetic: False swaps modules and computes no weight, for a shadow without data.

    Raises:
        PatchError: something failed; the model is as it was.
    """
    target = Target(model, arithmetic=arithmetic)
    try:
        for patch in plan.patches:
            patch.apply(target)
    except Exception as error:  # whatever went wrong, the model must be put back first
        undo(model, arithmetic=arithmetic)
        raise PatchError(
            f"the model was put back as it was, since patching failed: {error}"
        ) from error


def undo(model: nn.Module, *, arithmetic: bool = True, unfolds: bool = True) -> None:
    """Take back what patches left on the model, also after training, wherever it is now.

    Args:
        arithmetic: as of :func:`apply_plan`.
        unfolds: False leaves folded weights as they are.

    Raises:
        PatchError: the Linears behind a folded norm are not found; nothing was touched.
    """
    folded = folded_now(model)
    if arithmetic and unfolds:
        refuse_lost_linears(model, folded)
    put_back(model)
    for module in model.modules():
        remove_own(module)
    unfold(model, folded, arithmetic=arithmetic and unfolds)
