"""codes: an activation saves two bits for each element, and not its input (Approx-BP, arXiv 2406.16282).

The gradient is that of a step function: approximate, and said so.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.activations import CodesActivation
from lowmem_patch.strategies.activations import activation_sites
from lowmem_patch.strategies.protocol import Facts, Found, Skip
from lowmem_patch.strategies.swap import Swap

__all__ = ["CodedActivation", "find"]


@dataclasses.dataclass(frozen=True)
class CodedActivation(Swap):
    """An activation that saves codes; ``in_place``: it overwrites its input."""

    strategy = "codes"
    approximate = True

    activation: ActivationKind
    in_place: bool

    def make(self, original: nn.Module) -> nn.Module:
        return CodesActivation(self.activation, self.in_place)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every activation with a step table that is not better recomputed."""
    found = Found()
    for site in activation_sites(facts, config):
        if isinstance(site, Skip) or site.chosen != "codes":
            continue
        if site.kind not in STEP_TABLES:
            found.add(site.skip(f"no step table for {site.kind}: `recompute` is exact"))
            continue
        if not facts.saved(site.name):
            text = "nothing to gain: its input is kept for another op, or not at all"
            found.add(site.skip(text))
            continue
        reason = "2-bit codes in place of its input"
        if config.activations == "auto":
            none = "no Linear that trains reads it"
            reason += f": {none if site.hook is None else f'read by {site.hook}'}"
        found.add(
            CodedActivation(
                site.name, site.kind, site.in_place,
                reason=reason, kind=site.kind, consumers=site.texts,
            )
        )  # fmt: skip
    return found
