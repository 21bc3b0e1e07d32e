"""one copy: Linears that read one tensor, frozen ones, and softmaxes, of which autocast would save copies in
low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
from lowmem_patch.strategies.protocol import Change, Facts, Found, hook_behind
from lowmem_patch.strategies.scales import scaled_outputs
from lowmem_patch.tracing.base_model import base_model
from lowmem_patch.tracing.consumers import find_consumers
from lowmem_patch.tracing.dataflow import backward, moved_from
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key

# how somebody gets at a tensor's memory, and may write between two casts without a trace
_UNSEEN = Role.UNTRACKED | Role.DETACH | Role.MEMORY | Role.ADDRESS


def find(facts: Facts, config: PatchConfig) -> Found:
    """Linears beside others that read the same, frozen float32 ones beside something that trains, and
    softmaxes that matmuls alone read."""
    if config.linear_inputs == "keep":
        return Found()

    def patch(name: str, change: Callable[..., Any], *settings: Any) -> Change:
        return Change(name, "one_copy", change, settings, for_autocast=True)

    before = nn.Module.register_forward_pre_hook
    siblings = list(_siblings(facts, config))
    number, groups = sum(len(own) for _, own in siblings), len(siblings)
    text = f"where autocast is on, {number} Linears that read one tensor save one cast of it"
    if groups > 1:
        text = f"where autocast is on, {number} Linears in {groups} groups save one cast for each group"
    return Found(
        [
            *(patch(name, before, Own(keep_weight)) for name in _frozen_linears(facts, config)),
            *(patch(name, _share_casts, own) for name, own in siblings),
            *(patch(name, hook_behind, keep_matrix) for name in _softmaxes(facts)),
        ],
        notes=[text] if number else [],
    )


def _share_casts(module: nn.Module, linears: list[str]) -> None:
    share_casts(module, [module.get_submodule(name) for name in linears])


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
    float32 tensor; and the Linears, by their names in there."""
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
        yield caller, [n.removeprefix(f"{caller}.") for n in facts.modules if n in own]


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
    normed = saved_by_norms(facts)
    for call in facts.calls.get(name, ()):
        x = call.inputs[0] if call.inputs else None
        if x is None or x.dtype != torch.float32 or id(x) in facts.trace.parameters:
            continue
        unseen = any(op.role.has(_UNSEEN) for op in facts.trace.consumers.get(id(x), ()))
        if not unseen and normed.isdisjoint(
            map(storage_key, backward(facts.makers, x, moved_from))
        ):
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
