"""channel norms: a BatchNorm or GroupNorm and the activation behind it save the norm's input alone; exact."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.channel_norms import DeferChannelNorms
from lowmem_patch.nn.modes import run_under
from lowmem_patch.strategies import recompute
from lowmem_patch.strategies.activations import next_to_nothing, normed_channels
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target

_WORTH = 1e-4
_REASON = "input kept, norm and activation recomputed from it for {reader}"


@dataclasses.dataclass(frozen=True)
class DeferredChannelNorm(Patch):
    """A module whose forward calls a norm over channels, which an activation reads."""

    strategy = "recompute"

    def apply(self, target: Target) -> None:
        run_under(target.model.get_submodule(self.site), DeferChannelNorms)


def find(facts: Facts, config: PatchConfig) -> Found:
    """The norms over channels that activations alone read, which are computed again."""
    found = Found()
    if config.norms == "keep":
        return found
    deferrable = normed_channels(facts)
    readers = {
        id(tensor): patch.site
        for patch in recompute.find(facts, config).patches
        if not patch.gated
        for call in facts.calls_of(patch.site)
        for tensor in call.inputs
    }
    by_module: dict[str, list[Tensor]] = {}
    for op in deferrable.values():
        by_module.setdefault(op.module, []).extend(op.outputs)
    for name, outputs in by_module.items():
        gain = sum(output.nbytes for output in outputs)
        if all(id(output) in readers for output in outputs) and not next_to_nothing(
            facts, gain, _WORTH
        ):
            reader = readers[id(outputs[0])]
            found.add(
                DeferredChannelNorm(
                    name,
                    reason=_REASON.format(reader=reader),
                    kind="channel_norm",
                    consumers=(reader,),
                )
            )
    return found
