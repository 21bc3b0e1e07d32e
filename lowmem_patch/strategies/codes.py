"""codes: an activation saves a few bits for each element, and not its input (Approx-BP, arXiv 2406.16282).

The gradient is that of a step function: approximate, and said so. Where the activation's own derivative is
such a function (ReLU and its kin), one bit is exact.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STEP_TABLES, codes_bytes
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.activations import CodesActivation
from lowmem_patch.strategies.activations import (
    NOTHING_TO_GAIN,
    ActivationSite,
    activation_sites,
    is_output,
    next_to_nothing,
)
from lowmem_patch.strategies.protocol import Facts, Found, Skip
from lowmem_patch.strategies.swap import Swap

_WORTH = 1e-3  # `auto` leaves a sigmoid or tanh exact that saves less


@dataclasses.dataclass(frozen=True)
class CodedActivation(Swap):
    """An activation that saves codes; ``in_place``: it overwrites its input."""

    activation: ActivationKind
    bits: int
    in_place: bool

    def make(self, original: nn.Module) -> nn.Module:
        return CodesActivation(self.activation, self.bits, self.in_place)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every activation with a step table that is not better recomputed."""
    found = Found()
    for site in activation_sites(facts, config):
        if isinstance(site, Skip) or site.chosen != "codes":
            continue
        why_not = _obstacle(facts, site, config)
        if why_not is not None:
            found.add(site.skip(why_not))
            continue
        found.add(
            CodedActivation(
                site.name, "codes", site.kind, config.bits, site.in_place,
                reason=_reason(site, config), kind=site.kind, consumers=site.texts,
                approximate=not STEP_TABLES[site.kind][config.bits].exact,
                function=site.function, saves=_cost(facts, site, config),
            )
        )  # fmt: skip
    return found


def _obstacle(facts: Facts, site: ActivationSite, config: PatchConfig) -> str | None:
    if site.kind not in STEP_TABLES:
        return f"no step table for {site.kind}: `recompute` is exact"
    table, saved = STEP_TABLES[site.kind][config.bits], facts.saved(site.name)
    # what a dropout makes of the output is another tensor
    kept = site.saves == "output" and site.linear is not None and config.linear_inputs != "keep"
    kept = kept and is_output(facts, site.name, site.linear)
    # one module may be called at many places, and others keep what it saves at most of them
    if saved <= _cost(facts, site, config) or kept:
        return NOTHING_TO_GAIN
    # a pooler's tanh, a gate's sigmoid for each image: the gradient stays exact for so little
    chooses = config.activations == "auto" and site.saves == "output"
    return next_to_nothing(facts, saved, _WORTH) if chooses and not table.exact else None


def _cost(facts: Facts, site: ActivationSite, config: PatchConfig) -> int:
    """Bytes of the codes."""
    bits = STEP_TABLES[site.kind][config.bits].bits
    return sum(codes_bytes(output.numel(), bits) for output in facts.outputs(site.name))


def _reason(site: ActivationSite, config: PatchConfig) -> str:
    table = STEP_TABLES[site.kind][config.bits]
    # in place, some activations save their output, and some a copy of their input
    saved = "what it saves" if site.in_place else f"its {site.saves}"
    reason = f"{table.bits}-bit codes in place of {saved}"
    if table.exact:
        return f"{reason}: exact, since its derivative takes two values"
    if config.activations != "auto":
        return reason
    why = "a frozen Linear reads it" if site.hook is None else f"read by {site.hook}"
    return f"{reason}: {why}"
