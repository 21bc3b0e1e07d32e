"""scales: the output of a Linear that is multiplied with a scale that trains is not saved; exact.

LayerScale (CaiT, ConvNeXt, BEiT, DINOv2) has a number for each channel, a gate one for all. The scale's
gradient is a row sum of the weight's gradient times the weight (`lowmem_patch.functional.scaled_linear`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.own import runs_class_forward
from lowmem_patch.nn.scales import keep_for_scale
from lowmem_patch.strategies.protocol import Change, Facts, Found, hook_behind, once
from lowmem_patch.tracing.call_arguments import dropout_call, moved_channel
from lowmem_patch.tracing.dataflow import backward, first_input
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.trace import Op


def find(facts: Facts, config: PatchConfig) -> Found:
    """Linears that train, whose output is saved for a scale alone."""
    names = dict.fromkeys(name for name, _ in scaled_outputs(facts, config))
    patches = [Change(name, "scales", hook_behind, (keep_for_scale,)) for name in names]
    return Found().take(patches, "Linears whose output is not saved for the scale behind it")


@once
def scaled_outputs(facts: Facts, config: PatchConfig) -> list[tuple[str, Tensor]]:
    """Names of Linears that train, and what a product with such a scale alone saves of them."""
    if config.linear_inputs == "keep":
        return []
    found = list(_scaled(facts))
    if config.storage == "exact":
        return found
    # In the place of the output the input is saved in full, and no longer in 8 bits: that is less where it is
    # much smaller, as what lora_B reads is
    return [(name, output) for name, output in found if _reads_less(facts, name)]


def _reads_less(facts: Facts, name: str) -> bool:
    linear = facts.modules[name]
    return bool(2 * linear.in_features <= linear.out_features)


def _scaled(facts: Facts) -> Iterator[tuple[str, Tensor]]:
    calls = {
        id(call.outputs[0]): call.name
        for call in facts.trace.calls
        if len(call.outputs) == 1 and _is_plain(facts.modules[call.name])
    }
    for op in facts.trace.ops:
        if not op.role.has(Role.PRODUCT) or op.opaque or len(op.args) != 2:
            continue
        for value, scale in (op.args, op.args[::-1]):
            if not isinstance(value, Tensor) or not isinstance(scale, Tensor):
                continue
            name = calls.get(id(list(backward(facts.makers, value, _passed_on))[-1]))
            is_scaled = name is not None and _is_scale(scale, facts.modules[name])
            if name is not None and is_scaled and facts.is_saved_for(op, value, alone=True):
                yield name, value


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a Linear whose output is its product: no hook and no forward of others is there."""
    return type(module) is nn.Linear and not module._forward_hooks and runs_class_forward(module)


def _is_scale(scale: Tensor, linear: Any) -> bool:
    """Whether a tensor that trains has one number, or one for each output of a Linear that trains."""
    numbers = (1, linear.out_features)
    trains = scale.requires_grad and linear.weight.requires_grad
    return trains and linear.weight.is_floating_point() and scale.numel() in numbers


def _passed_on(op: Op, output: Tensor) -> Tensor | None:
    """What a dropout that does nothing got, or a permutation that moves the channel."""
    source = first_input(op)
    if source is None or op.writes:
        return None
    if op.role.has(Role.DROPOUT):
        return source if not dropout_call(op.args, op.kwargs).p else None
    moved = moved_channel(op.name, source, op.args[1:], op.kwargs)
    return None if moved is None else source
