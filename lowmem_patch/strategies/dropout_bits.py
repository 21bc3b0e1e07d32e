"""dropout bits: a dropout saves its mask in one bit for each element, from the same random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.activations import PackedDropout, keep_for_dropout
from lowmem_patch.strategies.lora import adapter_layers, inside_adapters
from lowmem_patch.strategies.protocol import Change, Facts, Found, hook_behind
from lowmem_patch.strategies.swap import Swap
from lowmem_patch.tracing.call_arguments import dropout_call
from lowmem_patch.tracing.consumers import find_consumers, read_compiled
from lowmem_patch.tracing.dataflow import first_input
from lowmem_patch.tracing.op_roles import Role


@dataclasses.dataclass(frozen=True)
class BitDropout(Swap):
    """A dropout that saves bits."""

    p: float

    def make(self, original: nn.Module) -> nn.Module:
        return PackedDropout(self.p)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every dropout module that drops, and whose gradient is asked for, in the order of the forward; and
    the Linears of whose output a dropout is called as a function.

    Those in adapter layers are left out: they are given a deferred input, which saves bits by itself.
    """
    if config.linear_inputs == "keep":
        return Found()
    found = {patch.site: patch for patch in _patches(facts, config)}
    text = "dropouts whose mask is kept in bits, one for each element"
    made = Found().take(list(found.values()), text)
    if found and facts.on_meta:
        made.notes.append("before, a mask is counted as a GPU keeps it: a byte for each element")
    return made


def _patches(facts: Facts, config: PatchConfig) -> Iterator[BitDropout | Change]:
    adapted, inside = adapter_layers(facts, config), inside_adapters(facts, config)
    # a call stands where it ends: the innermost comes first
    calls = reversed(facts.trace.calls)
    made_by = {id(tensor): call.name for call in calls for tensor in call.outputs}
    for op in facts.trace.ops:
        if not op.role.has(Role.DROPOUT) or op.module.startswith(inside):
            continue
        call = dropout_call(op.args, op.kwargs)
        if not 0 < call.p < 1 or call.in_place or not op.outputs[0].requires_grad:
            continue
        if type(facts.modules.get(op.module)) is nn.Dropout:
            yield BitDropout(op.module, "dropout_bits", call.p)
            continue
        name = made_by.get(id(first_input(op)), "")
        if type(facts.modules[name]) is nn.Linear or name in adapted:
            made = facts.outputs(name)
            if read_compiled(facts.trace, made, find_consumers(facts.trace, made)) is None:
                yield Change(name, "dropout_bits", hook_behind, (keep_for_dropout,))
