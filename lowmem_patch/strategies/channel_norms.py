"""channel norms: a BatchNorm or GroupNorm and the activation behind it save the norm's input alone; exact."""

from __future__ import annotations

import dataclasses

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.channel_norms import DeferChannelNorms
from lowmem_patch.nn.modes import run_under
from lowmem_patch.strategies import recompute
from lowmem_patch.strategies.activations import next_to_nothing, normed_channels
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target
from lowmem_patch.tracing.trace import Op

_WORTH = 1e-4


@dataclasses.dataclass(frozen=True)
class DeferredChannelNorm(Patch):
    """A module whose forward calls a norm over channels, which an activation reads."""

    strategy = "recompute"

    def apply(self, target: Target) -> None:
        run_under(target.model.get_submodule(self.site), DeferChannelNorms)


def find(facts: Facts, config: PatchConfig) -> Found:
    """The norms over channels that recomputed activations alone read."""
    found = Found()
    if config.norms == "keep":
        return found
    readers = {
        id(call.inputs[0]): patch.site
        for patch in recompute.find(facts, config).patches
        if not patch.gated
        for call in facts.calls_of(patch.site)
        if call.inputs
    }
    by_module: dict[str, list[Op]] = {}
    for op in normed_channels(facts).values():
        by_module.setdefault(op.module, []).append(op)
    for name, ops in by_module.items():
        outputs = [op.outputs[0] for op in ops]
        little = next_to_nothing(facts, sum(output.nbytes for output in outputs), _WORTH)
        if little is None and all(id(output) in readers for output in outputs):
            reader = readers[id(outputs[0])]
            reason = f"input kept, norm and activation recomputed from it for {reader}"
            kind = ops[0].name
            found.add(DeferredChannelNorm(name, reason=reason, kind=kind, consumers=(reader,)))
    return found
