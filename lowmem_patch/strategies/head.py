"""head: logits are computed where they are read, and a cross entropy reads them a chunk of rows at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.head import defer_logits
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.strategies.lora import adapter_layers
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target
from lowmem_patch.tracing.op_roles import REARRANGES, SELECTS, Role

__all__ = ["DeferredLogits", "find", "head_names"]

# What is wider than that against its input is a vocabulary: logits are larger than all that one layer saves.
_WIDER = 2
_PASSES_ON = (
    REARRANGES | SELECTS | Role.CAST | Role.SUM | Role.PRODUCT | Role.DIVISION | Role.ELEMENTWISE
    | Role.LOG_SOFTMAX
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DeferredLogits(Patch):
    """A head whose logits wait; ``low_precision`` of a LoRA layer as of `lowmem_patch.strategies.lora`."""

    strategy = "head"

    low_precision: bool | None

    def apply(self, target: Target) -> None:
        defer_logits(target.model.get_submodule(self.site), self.low_precision)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every Linear, or LoRA layer of one, whose output is the model's logits."""
    found = Found()
    if config.head == "keep":
        return found
    adapted = adapter_layers(facts, config)
    for name in head_names(facts, config):
        low_precision = config.linear_inputs == "activation_dtype" if name in adapted else None
        found.add(DeferredLogits(name, low_precision=low_precision))
        classes = facts.outputs(name)[0].shape[-1]
        found.notes.append(
            f"{name}: its {classes:,} logits a row are computed where they are read, and a cross entropy "
            "reads them a chunk of rows at a time"
        )
    found.notes += _others(facts, tuple(patch.site for patch in found.patches))
    return found


def head_names(facts: Facts, config: PatchConfig) -> tuple[str, ...]:
    """Names of the heads whose logits wait."""
    if config.head == "keep":
        return ()
    adapted = adapter_layers(facts, config)
    names: tuple[str, ...] = facts.once(head_names, lambda: tuple(_heads(facts, adapted)))
    return names


def _heads(facts: Facts, adapted: tuple[str, ...]) -> Iterator[str]:
    inside = tuple(f"{name}." for name in adapted)
    for name in facts.order:
        module = facts.modules[name]
        plain = type(module) is nn.Linear and not name.startswith(inside)
        if (plain or name in adapted) and _is_head(facts, name):
            yield name


def _is_head(facts: Facts, name: str) -> bool:
    module = facts.modules[name]
    if has_foreign_forward(module) or name in facts.foreign_kernels:
        return False
    for call in facts.calls[name]:
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return False
        logits, x = call.outputs[0], call.inputs[0]
        if logits.shape[-1] < _WIDER * x.shape[-1] or not _reaches_caller(facts, logits):
            return False
    return True


def _reaches_caller(facts: Facts, logits: Tensor) -> bool:
    """Whether the caller, or a cross entropy, gets logits that were only moved, cast, scaled or capped."""
    pending, seen = [logits], {id(logits)}
    while pending:
        tensor = pending.pop()
        if id(tensor) in facts.trace.outputs:
            return True
        for op in facts.trace.consumers.get(id(tensor), ()):
            if op.role.has(Role.CROSS_ENTROPY):
                return True
            if op.role.has(_PASSES_ON):
                new = [t for t in op.outputs if id(t) not in seen and t.is_floating_point()]
                seen.update(map(id, new))
                pending += new
    return False


def _others(facts: Facts, heads: tuple[str, ...]) -> Iterator[str]:
    """Modules that look like heads and are left alone, with the reason."""
    for name in facts.leaves:
        module, outputs = facts.modules[name], facts.outputs(name)
        weight = getattr(module, "weight", None)
        if (name.startswith(heads) and heads) or type(module) is nn.Linear or not outputs:
            continue
        if "linear" not in type(module).__name__.lower() or not isinstance(weight, Tensor):
            continue
        wide = outputs[0].shape[-1] >= _WIDER * facts.calls[name][0].inputs[0].shape[-1]
        if wide and any(id(output) in facts.trace.outputs for output in outputs):
            yield f"{name}: logits are computed whole, since the head is a {type(module).__name__}"
