"""one copy: frozen Linears and softmaxes of which autocast would save a copy in low precision."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.copies import keep_matrix, keep_weight
from lowmem_patch.nn.own import Own, runs_class_forward
from lowmem_patch.strategies.lora import adapter_layers, trains
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target
from lowmem_patch.tracing.consumers import find_consumers
from lowmem_patch.tracing.op_roles import Role


class FrozenLinear(Patch):
    """A frozen float32 Linear that under autocast saves its weight, and no copy of it."""

    strategy = "one_copy"
    for_autocast = True

    def apply(self, target: Target) -> None:
        target.model.get_submodule(self.site).register_forward_pre_hook(Own(keep_weight))


class WideSoftmax(Patch):
    """A softmax of whose output the matmul behind it saves no copy under autocast."""

    strategy = "one_copy"
    for_autocast = True

    def apply(self, target: Target) -> None:
        target.model.get_submodule(self.site).register_forward_hook(Own(keep_matrix))


def find(facts: Facts, config: PatchConfig) -> Found:
    """Frozen float32 Linears beside something that trains, and softmaxes that matmuls alone read."""
    if config.linear_inputs == "keep":
        return Found()
    return Found(
        [
            *(FrozenLinear(name) for name in _frozen_linears(facts, config)),
            *(WideSoftmax(name) for name in _softmaxes(facts)),
        ]
    )


def _frozen_linears(facts: Facts, config: PatchConfig) -> Iterator[str]:
    if not any(map(trains, facts.modules.values())):
        return
    # LoRA layers save none anyway, and do not run as one op where a part of theirs has a hook
    parts = {id(m) for name in adapter_layers(facts, config) for m in facts.modules[name].modules()}
    for name, module in facts.modules.items():
        if type(module) is not nn.Linear or id(module) in parts or not runs_class_forward(module):
            continue
        if not module.weight.requires_grad and module.weight.dtype.itemsize == 4:
            yield name


def _softmaxes(facts: Facts) -> Iterator[str]:
    for name, module in facts.modules.items():
        if type(module) is not nn.Softmax or name not in facts.calls:
            continue
        consumers = find_consumers(facts.trace, facts.outputs(name))
        if consumers and all(
            consumer.op is not None
            and consumer.use != "opaque"
            and consumer.op.role.has(Role.MATMUL)
            and consumer.op.args[0] is consumer.tensor
            for consumer in consumers
        ):
            yield name
