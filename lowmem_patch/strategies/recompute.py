"""recompute: an activation's output is computed again in backward from what is saved anyway; exact."""

from __future__ import annotations

import dataclasses

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.activations import RecomputedActivation
from lowmem_patch.nn.deferred_ops import Activation
from lowmem_patch.strategies.activations import (
    READS,
    ActivationSite,
    activation_sites,
    are_weighed,
    consumers_of,
    input_read_later,
    is_frozen,
    next_to_nothing,
    products,
    unknown_activations,
)
from lowmem_patch.strategies.protocol import Facts, Found, Skip
from lowmem_patch.strategies.swap import Swap
from lowmem_patch.tracing.consumers import Consumer, weight_read_with, weight_trains

NAME = "recompute"
_WORTH = 1e-4  # the gate of a squeeze and excitation has one number a channel


@dataclasses.dataclass(frozen=True)
class DeferredActivation(Swap):
    """An activation whose readers compute it again.

    ``reads``, ``at_once``, ``gated`` and ``weighed`` are as of `lowmem_patch.nn.deferred_ops.Activation`;
    ``in_place`` as of `ActivationSite`.
    """

    activation: ActivationKind
    reads: int
    at_once: bool
    gated: bool
    weighed: bool
    in_place: bool

    def make(self, original: nn.Module) -> nn.Module:
        op = Activation(self.activation, self.reads, self.at_once, self.gated, self.weighed)
        return RecomputedActivation(op, self.in_place)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every activation that is better recomputed, and those that no strategy may patch."""
    found = Found(skips=list(unknown_activations(facts)))
    for site in activation_sites(facts, config):
        if isinstance(site, Skip):
            found.add(site)
        elif site.chosen == "recompute":
            behind = consumers_of(facts, products(site.consumers))
            reason = _reason(site, behind)
            left = _left_alone(facts, site, reason)
            if left is not None or reason is None:
                found.add(site.skip(left or _nothing_to_gain(site)))
                continue
            at_once = save_sources(behind) if site.gated else not site.reads
            weighed = site.gated and _weighed(facts, behind)
            found.add(
                DeferredActivation(
                    site.name, NAME, site.kind, site.reads, at_once, site.gated, weighed, site.in_place,
                    reason=reason, kind=site.kind, consumers=site.texts, function=site.function,
                )
            )  # fmt: skip
    return found


def save_sources(readers: list[Consumer]) -> bool:
    """Whether all save what a value is computed from in its place, and one of them trains."""
    known = all(weight_read_with(reader) is not None for reader in readers)
    return known and any(map(weight_trains, readers))


def _weighed(facts: Facts, behind: list[Consumer]) -> bool:
    """Whether rows of what a Linear makes of a gated product are multiplied with numbers, for whose gradient
    the Linear's output would be saved."""
    return any(
        output.dim() == 2 and output.dtype == reader.tensor.dtype and are_weighed(facts, output)
        for reader in behind
        if reader.use == "linear" and reader.op is not None and reader.tensor is not None
        for output in reader.op.outputs
    )


def _left_alone(facts: Facts, site: ActivationSite, reason: str | None) -> str | None:
    """Why an activation cannot be recomputed, or saves so little that a Python call is too much for it."""
    reader = input_read_later(facts, site.name) if site.in_place else None
    if reader is not None:
        return f"cannot recompute: it works in place, and {reader} reads what its input was"
    if site.hook is not None:
        return f"cannot recompute: it is read by {site.hook}"
    writer = None if site.in_place else facts.written(site.name, "inputs")
    if writer is not None:
        return f"cannot recompute: its input is written in place by {writer}"
    # one that saves its output loses it to a dropout alone: as before the classifier of a pooled row
    if reason is None or site.gated or (site.linear is not None and site.saves == "input"):
        return None
    gain = sum(output.nbytes for output in facts.outputs(site.name))
    return next_to_nothing(facts, gain, _WORTH)


def _nothing_to_gain(site: ActivationSite) -> str:
    """Why a recompute saves no byte."""
    reader = site.consumers[0] if site.consumers else None
    if reader is None:
        return "nothing to gain: its output is read by nothing"
    if is_frozen(reader) and site.saves == "input":
        return (
            f"no exact way saves bytes: {reader.text} is frozen and does not save the output, and the "
            "derivative needs the input"
        )
    return f"nothing to gain: its output is read by {reader.text}"


def _reason(site: ActivationSite, behind: list[Consumer]) -> str | None:
    """What is saved in the place of the output; None where nobody would gain."""
    if site.saves == "output" and not site.recomputing_gains:
        return None
    if site.gated:
        other = next((c for c in behind if weight_read_with(c) is None), None)
        if other is None:
            return "gate and up kept, their product recomputed"
        return (
            "gate and up kept, the activation's output recomputed; their product is read by "
            f"{other.text}"
        )
    if site.linear is not None:
        return f"input kept, output recomputed for the weight gradient of {site.linear.text}"
    if site.normed and site.saves == "input" and not site.reads:
        return "input of the norm kept, its output recomputed"
    if site.reads:
        readers = dict.fromkeys(c.text for c in site.consumers if c.use in READS)
        return f"input kept, output recomputed in the backward of {next(iter(readers))}"
    return None
