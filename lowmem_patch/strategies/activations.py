"""The activations of a model, and which of codes and recompute decides on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import ActivationKind
from lowmem_patch.strategies.protocol import Facts, Skip
from lowmem_patch.tracing.consumers import (
    Consumer,
    consumers_behind_dropouts,
    find_consumers,
    weight_trains,
)
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import looks_like_activation, looks_like_norm

__all__ = ["NOTHING_TO_GAIN", "ActivationSite", "activation_sites", "unknown_activations"]

NOTHING_TO_GAIN = "nothing to gain: what it needs is kept for another op, or not at all"


@dataclasses.dataclass(frozen=True)
class ActivationSite:
    """An activation that some strategy may patch.

    Attributes:
        consumers: who reads the output, also behind a dropout.
        in_place: it overwrites its input, and nobody else writes into the output.
        gated: the output is multiplied with another tensor of its shape.
        linear: a Linear that trains, and reads the output.
        saves: what autograd saves of the activation, its ``input`` or its ``output``.
        recomputing_gains: fewer bytes are saved where the output is computed again.
        hook: what waits for the gradient of the output or of the gated product, or asks for the memory, as a
            report names it.
        chosen: the strategy that decides on it, ``codes`` or ``recompute``.
    """

    name: str
    kind: ActivationKind
    consumers: list[Consumer]
    in_place: bool
    gated: bool
    linear: Consumer | None
    hook: str | None
    saves: str
    recomputing_gains: bool
    chosen: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Who reads the output, as a report names them."""
        return tuple(dict.fromkeys(consumer.text for consumer in self.consumers))

    def skip(self, reason: str) -> Skip:
        return Skip(self.name, self.kind, reason, self.texts)


def activation_sites(facts: Facts, config: PatchConfig) -> list[ActivationSite | Skip]:
    """Each activation of the model, in the order of the forward, or why no strategy may patch it."""
    sites: list[ActivationSite | Skip] = facts.once(
        activation_sites, lambda: list(_find_sites(facts, config))
    )
    return sites


def _find_sites(facts: Facts, config: PatchConfig) -> Iterator[ActivationSite | Skip]:
    for name in facts.leaves:
        kind = facts.activation(name)
        if kind is not None and name not in facts.foreign_kernels:
            site = _site(facts, name, kind, config)
            obstacle = _obstacle(facts, site, config)
            yield site if obstacle is None else site.skip(obstacle)


def unknown_activations(facts: Facts) -> Iterator[Skip]:
    """Modules that look like activations, and are none that we know or may touch."""
    for name in facts.leaves:
        module = facts.modules[name]
        if looks_like_norm(module) or not looks_like_activation(module):
            continue
        if name in facts.foreign_kernels:
            yield Skip(name, "other", "runs a kernel of its own")
        elif facts.activation(name) is None:
            # with its parameters: LeakyReLU(negative_slope=0.1) is none of ours
            unknown = f"no step table for {str(module).removesuffix('()')}"
            yield Skip(name, "other", unknown if facts.saved(name) else NOTHING_TO_GAIN)


def products(consumers: list[Consumer]) -> list[Tensor]:
    """The gated products that are made of an output."""
    return [t for c in consumers if c.use == "product" and c.op for t in c.op.outputs]


def consumers_of(facts: Facts, outputs: list[Tensor]) -> list[Consumer]:
    """Who reads an activation's output or a gated product, also behind a dropout."""
    return consumers_behind_dropouts(facts.trace, find_consumers(facts.trace, outputs))


def _site(facts: Facts, name: str, kind: ActivationKind, config: PatchConfig) -> ActivationSite:
    consumers = consumers_of(facts, facts.outputs(name))
    rows = [consumer for consumer in consumers if not consumer.reshaped]  # what can be deferred
    hook = _hook(facts, consumers)
    saves = "output" if _saves_output(facts, name) else "input"
    gated = any(consumer.use == "product" for consumer in rows)
    linear = next((consumer for consumer in rows if weight_trains(consumer)), None)
    gains = gated or linear is not None
    if saves == "output":
        # a Linear or a product keeps what the activation does; only a product that a Linear keeps can go
        gains = any(map(weight_trains, consumers_of(facts, products(rows))))
    gains = gains and hook is None
    in_place = _works_in_place(name, consumers)
    chosen = _choose(config, kind, gains=gains, possible=gains and not in_place)
    return ActivationSite(
        name, kind, consumers, in_place, gated, linear, hook, saves, gains, chosen
    )


def _works_in_place(name: str, consumers: list[Consumer]) -> bool:
    """Whether the module itself writes into its output, and nobody else does."""
    writers = [consumer for consumer in consumers if consumer.use == "write"]
    return bool(writers) and all(w.op is not None and w.op.module == name for w in writers)


def _saves_output(facts: Facts, name: str) -> bool:
    """Whether torch's derivative of each call's last op is one of the output."""
    return all(
        any(
            op.role.has(Role.SAVES_OUTPUT) and any(made is call.outputs[0] for made in op.outputs)
            for op in facts.trace.ops[call.first_op : call.last_op]
        )
        for call in facts.calls[name]
    )


def _choose(config: PatchConfig, kind: ActivationKind, *, gains: bool, possible: bool) -> str:
    """The strategy that decides on an activation: by what recomputing gains, and whether it is possible."""
    tables = STEP_TABLES.get(kind)
    if tables is not None and tables[config.bits].exact and not possible:
        return "keep" if config.activations == "keep" else "codes"  # no approximation
    if config.activations == "auto":
        return "recompute" if gains or tables is None else "codes"
    return config.activations


def _hook(facts: Facts, consumers: list[Consumer]) -> str | None:
    """Who hangs a hook on the output or on the gated product, or asks for its memory: it cannot wait then."""
    behind = products(consumers)
    for consumer in consumers + (consumers_of(facts, behind) if behind else []):
        if consumer.op is not None and consumer.op.role.has(Role.HOOK | Role.UNTRACKED):
            return consumer.text
    return None


def _obstacle(facts: Facts, site: ActivationSite, config: PatchConfig) -> str | None:
    if config.activations == "keep":
        return "activations: keep"
    writers = [consumer.text for consumer in site.consumers if consumer.use == "write"]
    inside = site.in_place or not writers
    writer = facts.written(site.name, "outputs") if inside else writers[0]
    return None if writer is None else f"its output is written in place by {writer}"
