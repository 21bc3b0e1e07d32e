"""dropout bits: a dropout saves its mask in one bit for each element, from the same random numbers."""

from __future__ import annotations

import dataclasses

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.dropout import PackedDropout
from lowmem_patch.strategies.lora import adapter_layers
from lowmem_patch.strategies.protocol import Facts, Found
from lowmem_patch.strategies.swap import Swap
from lowmem_patch.tracing.call_arguments import dropout_call
from lowmem_patch.tracing.op_roles import Role

__all__ = ["BitDropout", "find"]


@dataclasses.dataclass(frozen=True)
class BitDropout(Swap):
    """A dropout that saves bits."""

    strategy = "dropout_bits"

    p: float

    def make(self, original: nn.Module) -> nn.Module:
        return PackedDropout(self.p)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every dropout module that drops, and whose gradient is asked for, in the order of the forward.

    Those in adapter layers are left out: they are given a deferred input, which saves bits by itself.
    """
    found: dict[str, BitDropout] = {}
    if config.linear_inputs == "keep":
        return Found()
    layers = tuple(f"{name}." for name in adapter_layers(facts, config))
    for op in facts.trace.ops:
        module = facts.modules.get(op.module)
        if not op.role.has(Role.DROPOUT) or type(module) is not nn.Dropout:
            continue
        call = dropout_call(op.args, op.kwargs)
        wanted = 0 < call.p < 1 and not call.in_place and op.outputs[0].requires_grad
        if wanted and not op.module.startswith(layers):
            found[op.module] = BitDropout(op.module, call.p)
    notes = []
    if found:
        notes.append(f"dropouts whose mask is kept in bits, one for each element: {len(found)}")
        if facts.on_meta:
            notes.append("before, a mask is counted as a GPU keeps it: a byte for each element")
    return Found(list(found.values()), notes=notes)
