"""head: logits are computed where they are read, and a cross entropy reads them a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.head import defer_logits
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.strategies.lora import adapter_layers, inside_adapters
from lowmem_patch.strategies.protocol import Change, Facts, Found, once
from lowmem_patch.tracing.op_roles import OF_LOGITS, Role

# What is wider than that against its input is a vocabulary: logits are larger than all that one layer saves.
_WIDER = 2
_READS_CHUNKS = Role.CROSS_ENTROPY | Role.LOG_SUM_EXP | Role.GATHER | Role.ARGMAX


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every Linear, or LoRA layer of one, whose output is the model's logits."""
    found = Found()
    if config.head == "keep":
        return found
    for name in head_names(facts, config):
        adapted = name in adapter_layers(facts, config)
        low_precision = config.linear_inputs == "activation_dtype" if adapted else None
        found.add(Change(name, "head", defer_logits, (low_precision,)))
        classes = facts.outputs(name)[0].shape[-1]
        found.notes.append(
            f"{name}: its {classes:,} logits per row are computed only when read; a cross entropy computes "
            "them in chunks of rows"
        )
    found.notes += _others(facts, config)
    return found


@once
def head_names(facts: Facts, config: PatchConfig) -> tuple[str, ...]:
    """Names of the heads whose logits wait."""
    if config.head == "keep":
        return ()
    wide = (name for name in facts.order if _is_wide(facts, config, name))
    return tuple(name for name in wide if _readers(facts, name) == [])


def _is_wide(facts: Facts, config: PatchConfig, name: str) -> bool:
    """Whether a Linear, or a LoRA layer of one, has the width of a vocabulary."""
    module = facts.modules[name]
    inside = name.startswith(inside_adapters(facts, config))
    known = type(module) is nn.Linear and not inside
    if not known and name not in adapter_layers(facts, config):
        return False
    if has_foreign_forward(module) or name in facts.foreign_kernels:
        return False
    return all(
        len(call.inputs) == len(call.outputs) == 1
        and call.outputs[0].shape[-1] >= _WIDER * call.inputs[0].shape[-1]
        for call in facts.calls[name]
    )


def _readers(facts: Facts, name: str) -> list[str] | None:
    """Who reads the logits whole in the model's own forward; None where they are no logits: neither the
    caller nor a cross entropy gets them, moved, cast, scaled or capped."""
    pending, seen = facts.outputs(name), set(map(id, facts.outputs(name)))
    reached, readers = False, []
    while pending:
        tensor = pending.pop()
        reached = reached or id(tensor) in facts.trace.outputs
        for op in facts.trace.consumers.get(id(tensor), ()):
            reached = reached or op.role.has(Role.CROSS_ENTROPY)
            if op.role.has(OF_LOGITS) and not op.writes:
                new = [t for t in op.outputs if id(t) not in seen and t.is_floating_point()]
                seen.update(map(id, new))
                pending += new
            elif not op.role.has(_READS_CHUNKS):
                readers.append(op.place)
    return readers if reached else None


def _others(facts: Facts, config: PatchConfig) -> Iterator[str]:
    """Heads whose logits are computed whole, with the reason."""
    for name in facts.order:
        if _is_wide(facts, config, name):
            if readers := _readers(facts, name):
                yield f"{name}: logits are computed whole, since {readers[0]} reads them"
            continue
        module, outputs = facts.modules[name], facts.outputs(name)
        label, weight = type(module).__name__, getattr(module, "weight", None)
        if (
            type(module) is nn.Linear
            or "linear" not in label.lower()
            or not isinstance(weight, Tensor)
        ):
            continue
        x = facts.calls[name][0].inputs
        wide = x and outputs and outputs[0].shape[-1] >= _WIDER * x[0].shape[-1]
        if wide and _readers(facts, name) == []:
            yield f"{name}: logits are computed whole, since the head is a {label}"
