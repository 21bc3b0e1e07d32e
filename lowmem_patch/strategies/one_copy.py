"""one copy: Linears that read one tensor, frozen ones, and softmaxes, of which autocast would save copies in
low precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.copies import keep_matrix, keep_weight, share_casts
from lowmem_patch.nn.own import (
    Own,
    has_foreign_forward,
    is_compiled_function,
    runs_class_forward,
)
from lowmem_patch.strategies.lora import adapter_layers, saved_by_norms, trains
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target
from lowmem_patch.strategies.scales import scaled_outputs
from lowmem_patch.tracing.base_model import base_model
from lowmem_patch.tracing.consumers import find_consumers
from lowmem_patch.tracing.dataflow import backward, makers, moved_from
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key


class FrozenLinear(Patch):
    """A frozen float32 Linear that under autocast saves its weight, and no copy of it."""

    strategy = "one_copy"
    for_autocast = True

    def apply(self, target: Target) -> None:
        target.model.get_submodule(self.site).register_forward_pre_hook(Own(keep_weight))


# how somebody gets at a tensor's memory, and may write between two casts without a trace
_UNSEEN = Role.UNTRACKED | Role.DETACH | Role.MEMORY | Role.ADDRESS


@dataclasses.dataclass(frozen=True)
class SharedCasts(Patch):
    """A module around Linears that read one float32 tensor, of which they save one cast under autocast."""

    strategy = "one_copy"
    for_autocast = True

    linears: tuple[str, ...]

    def apply(self, target: Target) -> None:
        get = target.model.get_submodule
        share_casts(get(self.site), [get(name) for name in self.linears])


class WideSoftmax(Patch):
    """A softmax of whose output the matmul behind it saves no copy under autocast."""

    strategy = "one_copy"
    for_autocast = True

    def apply(self, target: Target) -> None:
        target.model.get_submodule(self.site).register_forward_hook(Own(keep_matrix))


def find(facts: Facts, config: PatchConfig) -> Found:
    """Linears beside others that read the same, frozen float32 ones beside something that trains, and
    softmaxes that matmuls alone read."""
    if config.linear_inputs == "keep":
        return Found()
    siblings = [SharedCasts(name, linears=tuple(own)) for name, own in _siblings(facts, config)]
    number = sum(len(patch.linears) for patch in siblings)
    text = f"where autocast is on, {number} Linears that read one tensor save one cast of it"
    return Found(
        [
            *(FrozenLinear(name) for name in _frozen_linears(facts, config)),
            *siblings,
            *(WideSoftmax(name) for name in _softmaxes(facts)),
        ],
        notes=[text] if number else [],
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


def _siblings(facts: Facts, config: PatchConfig) -> Iterator[tuple[str, list[str]]]:
    """Modules within which several Linears that train, or LoRA layers, which see to it themselves, read one
    float32 tensor; and the Linears."""
    if config.storage != "exact":
        return  # what they read is stored in 8 bits, once
    layers = adapter_layers(facts, config)
    parts = {id(m) for name in layers for m in facts.modules[name].modules()}
    scaled = {name for name, _ in scaled_outputs(facts, config)}
    linears = {name for name in _trained_linears(facts) if id(facts.modules[name]) not in parts}
    readers: dict[int, set[str]] = {}
    for name in (*linears - scaled, *layers):
        for x in _plain_inputs(facts, name):
            readers.setdefault(id(x), set()).add(name)
    around: dict[str, set[str]] = {}
    for names in readers.values():
        caller = _caller(facts, names) if len(names) > 1 else ""
        if caller:
            around.setdefault(caller, set()).update(names & linears)
    for caller, own in around.items():
        yield caller, [name for name in facts.modules if name in own]


def _caller(facts: Facts, names: set[str]) -> str:
    """The innermost module around all of these whose forward can be told so; empty if none is."""
    name = next(iter(names))
    while name and not (
        name in facts.calls and all(inside.startswith(f"{name}.") for inside in names)
    ):
        name = name.rpartition(".")[0]
    # trainers look at the arguments of the model's own forward
    if not name or facts.modules[name] is base_model(facts.modules[""]):
        return ""
    if has_foreign_forward(facts.modules[name]):
        return ""
    return "" if is_compiled_function(type(facts.modules[name]).forward) else name


def _trained_linears(facts: Facts) -> Iterator[str]:
    for name, module in facts.modules.items():
        if type(module) is nn.Linear and module.weight.requires_grad and runs_class_forward(module):
            yield name


def _plain_inputs(facts: Facts, name: str) -> Iterator[Tensor]:
    """The float32 tensors that a module reads, but those of which a patched norm gives it a copy. A parameter
    is cast each time."""
    made_by, normed = facts.once("makers", lambda: makers(facts.trace)), saved_by_norms(facts)
    for call in facts.calls.get(name, ()):
        x = call.inputs[0] if call.inputs else None
        if x is None or x.dtype != torch.float32 or id(x) in facts.trace.parameters:
            continue
        unseen = any(op.role.has(_UNSEEN) for op in facts.trace.consumers.get(id(x), ()))
        if not unseen and normed.isdisjoint(map(storage_key, backward(made_by, x, moved_from))):
            yield x


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
