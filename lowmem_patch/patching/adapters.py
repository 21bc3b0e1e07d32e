"""Which adapter layers shall keep one copy of their input, and why others do not (PEFT's names)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from lowmem_patch.nn.adapters import adds_products, is_adapter_forward
from lowmem_patch.nn.forwards import has_forward_of_others

__all__ = ["Adapters", "find_adapters", "frozen_linears"]


@dataclasses.dataclass(frozen=True)
class Adapters:
    """LoRA layers that train and keep one copy of their input, and what a report says of all layers."""

    layers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_adapters(modules: Mapping[str, nn.Module]) -> Adapters:
    """Look at every adapter layer that trains."""
    layers: list[str] = []
    alone: Counter[str] = Counter()
    dropouts: Counter[float] = Counter()
    steps: Counter[str] = Counter()
    for name, module in modules.items():
        if not hasattr(module, "base_layer") or not _trains(module):
            continue
        reason = _reason(module)
        if reason is not None:
            alone[reason] += 1
            continue
        layers.append(name)
        if not adds_products(type(module).forward):
            steps[type(module).__name__] += 1
        p = _dropout(module)
        if p > 0:
            dropouts[p] += 1
    notes = [f"{len(layers)} adapter layers keep one copy of their input"] if layers else []
    notes += [
        f"{count} of them keep one bit more for each element of it: the mask of their dropout of {p:g}"
        for p, count in dropouts.items()
    ]
    notes += [
        f"{count} of them ({kind}) run base and adapter one after the other, as their own forward does"
        for kind, count in steps.items()
    ]
    notes += [f"{count} adapter layers are left alone: {why}" for why, count in alone.items()]
    return Adapters(tuple(layers), tuple(notes))


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _active(layer: Any, table: str) -> list[Any]:
    """Entries of a layer's table of adapters, of those that are active."""
    entries = getattr(layer, table, {})
    return [entries[name] for name in layer.active_adapters if name in entries]


def _reason(layer: Any) -> str | None:
    """Why an adapter layer is left alone, or None."""
    if has_forward_of_others(layer, is_adapter_forward):
        return "other code gave them a forward of their own"
    if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) or not len(layer.lora_A):
        return f"{type(layer).__name__} of {type(layer).__module__.split('.')[-2]} is no LoRA of a Linear"
    kinds = {type(down).__name__ for down in layer.lora_A.values() if type(down) is not nn.Linear}
    if kinds:
        return f"their adapter is a {', '.join(sorted(kinds))} and no Linear"
    variants = {type(variant).__name__ for variant in _active(layer, "lora_variant")}
    if variants:
        return f"{', '.join(sorted(variants))} computes more with the input than x A^T B^T"
    return None


def _dropout(layer: Any) -> float:
    return max((float(getattr(d, "p", 0.0)) for d in _active(layer, "lora_dropout")), default=0.0)


def frozen_linears(modules: Mapping[str, nn.Module], adapters: Adapters) -> tuple[str, ...]:
    """Frozen Linears in float32, of which autocast would keep a copy in low precision for backward.

    The base Linears of ``adapters`` keep none anyway.
    """
    if not any(_trains(module) for module in modules.values()):
        return ()
    bases = {id(modules[name].base_layer) for name in adapters.layers}
    return tuple(
        name
        for name, module in modules.items()
        if type(module) is nn.Linear
        and id(module) not in bases
        and not module.weight.requires_grad
        and module.weight.dtype.itemsize == 4
        and "forward" not in module.__dict__
    )
