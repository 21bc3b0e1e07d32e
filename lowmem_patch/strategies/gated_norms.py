"""gated norms: ``norm(x) * act(gate)`` and ``norm(x * act(gate))`` save two or three tensors; exact.

Written out in torch they save many, most of them in float32. As in `share` the norm saves its output, or z.
Its product with the gate is computed again, as in `recompute`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.deferred_ops import Activation
from lowmem_patch.nn.gated_norms import GatedMSRMSNorm
from lowmem_patch.nn.norms import OutputUse
from lowmem_patch.strategies.activations import next_to_nothing
from lowmem_patch.strategies.norm_sites import NormSite, PatchSite, eps_name, read_as_it_lies
from lowmem_patch.strategies.protocol import Facts, Found, Skip
from lowmem_patch.strategies.recompute import save_sources
from lowmem_patch.strategies.share import shared_norm
from lowmem_patch.strategies.swap import Swap
from lowmem_patch.tracing.consumers import find_consumers, read_compiled
from lowmem_patch.tracing.gated_norms import GatedNormSpec
from lowmem_patch.tracing.op_roles import NEEDS_TENSOR

_WORTH = 1e-4


@dataclasses.dataclass(frozen=True)
class SharedGatedNorm(Swap):
    """A gated norm that saves the gate and its norm's output.

    Attributes:
        at_once: Linears alone read the product, one of which trains.
    """

    spec: GatedNormSpec
    use: OutputUse
    at_once: bool

    def make(self, original: Any) -> nn.Module:
        spec, settings = self.spec, self.spec.norm.settings
        name = eps_name(original, settings.eps)
        norm = GatedMSRMSNorm(original.weight, None, settings, use=self.use, eps_name=name)
        product = Activation(spec.activation, at_once=self.at_once, gated=True)
        norm.gating = None if spec.gate_first else product
        norm.kind, norm.groups = spec.activation, spec.groups
        norm.arguments, norm.needs_gate = spec.arguments, spec.needs_gate
        return norm


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every gated norm that saves more than its gate and the norm's output."""
    found = Found()
    for name in facts.leaves:
        spec = None if name in facts.foreign_kernels else facts.gated_norm(name)
        if spec is not None:
            consumers = find_consumers(facts.trace, facts.outputs(name))
            found.add(_patch_or_skip(facts, config, PatchSite(name, "rms_norm", consumers), spec))
    return found


def _patch_or_skip(
    facts: Facts, config: PatchConfig, site: PatchSite, spec: GatedNormSpec
) -> SharedGatedNorm | Skip:
    obstacle = _obstacle(facts, config, site)
    if obstacle is not None:
        return site.skip(obstacle)
    readers = site.consumers
    if spec.gate_first:
        inner = NormSite(
            site.name, site.kind, readers, spec.norm, facts.outputs(site.name), None, None
        )
        found = shared_norm(facts, config, inner, "").use
        computed = read_as_it_lies(readers)
        use = dataclasses.replace(found, behind_row_moves=False, of_computed=computed)
        reason = "x and the gate kept, their product and the norm recomputed"
        if not computed:
            reason = "x, the gate and the norm's output kept, or z in its place; their product recomputed"
    else:
        # the product saves the norm's output
        use = OutputUse(output=spec.norm.output, output_saved=True)
        reason = "the gate and the norm's output kept, their product recomputed"
    return SharedGatedNorm(
        site.name, "share", spec, use, save_sources(readers),
        reason=reason, kind=site.kind, consumers=site.texts,
    )  # fmt: skip


def _obstacle(facts: Facts, config: PatchConfig, site: PatchSite) -> str | None:
    if config.norms == "keep":
        return "norms: keep"
    for what in ("inputs", "outputs"):
        writer = facts.written(site.name, what)
        if writer is not None:
            return f"its {what.removesuffix('s')} is written in place by {writer}"
    for reader in site.consumers:
        if reader.use == "write":
            return f"its output is written in place by {reader.text}"
        if reader.op is not None and reader.op.role.has(NEEDS_TENSOR):
            return f"it is read by {reader.text}"
    compiled = read_compiled(facts.trace, facts.outputs(site.name), site.consumers)
    if compiled is not None:
        return f"its output {compiled}"
    return next_to_nothing(facts, facts.saved(site.name), _WORTH)
