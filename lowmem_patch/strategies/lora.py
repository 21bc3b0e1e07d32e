"""lora: a LoRA layer saves one copy of its input, and runs base and adapters as one op (PEFT's names)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.adapters import adapts_parameter, adds_products, use_adapter
from lowmem_patch.nn.low_rank import is_four_bit
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.strategies.protocol import Change, Facts, Found, once
from lowmem_patch.tracing.dataflow import backward, moved_from
from lowmem_patch.tracing.probes import NormSpec, looks_like_norm
from lowmem_patch.tracing.saved_bytes import storage_key


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every adapter layer that trains and is a LoRA of a Linear; why others are not, in the notes."""
    if config.linear_inputs == "keep":
        return Found()
    low_precision = config.linear_inputs == "activation_dtype"
    layers = adapter_layers(facts, config)
    alone, shared = _by_readers(facts, layers)
    patches = [
        Change(name, "lora", use_adapter, (low_precision, name in alone, name in shared))
        for name in layers
    ]
    return Found(patches, notes=_notes(facts, layers, low_precision))


def _by_readers(facts: Facts, layers: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """The layers whose input no one but such layers saves: no norm has made it, none reads a part of it; and
    those whose input another of them reads, too."""
    calls = [call for name in layers for call in facts.calls.get(name, ()) if call.inputs]
    readers = Counter(id(call.inputs[0]) for call in calls)
    parts: dict[int, set[int]] = {}
    for call in calls:
        parts.setdefault(storage_key(call.inputs[0]), set()).add(id(call.inputs[0]))
    inside = tuple(f"{name}." for name in layers)
    normed = saved_by_norms(facts)

    def is_saved(x: Tensor) -> bool:
        savers = facts.savers_of(x)
        if len(parts[storage_key(x)]) > 1 or not all(s.module.startswith(inside) for s in savers):
            return True
        forms = backward(facts.makers, x, moved_from)
        return not normed.isdisjoint(map(storage_key, forms))

    others = {call.name for call in calls if is_saved(call.inputs[0])}
    shared = {call.name for call in calls if readers[id(call.inputs[0])] > 1}
    return {call.name for call in calls} - others, shared


@once
def saved_by_norms(facts: Facts) -> set[int]:
    """Storages of norms' outputs that have a gradient, which patched norms save."""
    norms = [name for name in facts.calls if looks_like_norm(facts.modules[name])]
    norms += [name for name, one in facts.functions.items() if isinstance(one.kind, NormSpec)]
    outputs = (tensor for name in norms for tensor in facts.outputs(name))
    return {storage_key(tensor) for tensor in outputs if tensor.requires_grad}


@once
def adapter_layers(facts: Facts, config: PatchConfig) -> tuple[str, ...]:
    """Names of the adapter layers that save one copy of their input, and see to it themselves."""
    if config.linear_inputs == "keep":
        return ()
    return tuple(trained_lora_layers(facts.modules))


@once
def inside_adapters(facts: Facts, config: PatchConfig) -> tuple[str, ...]:
    """How the names of modules in these layers begin."""
    return tuple(f"{name}." for name in adapter_layers(facts, config))


def trained_lora_layers(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names of the layers that train and that a patch takes."""
    for name, module in modules.items():
        if _is_adapter(module) and _reason(module) is None:
            yield name


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and trains(module)


def _notes(facts: Facts, layers: tuple[str, ...], low_precision: bool) -> list[str]:
    taken = [facts.modules[name] for name in layers]
    adapters = filter(_is_adapter, facts.modules.values())
    reasons = Counter(reason for reason in map(_reason, adapters) if reason is not None)
    dropouts = Counter(p for p in map(_dropout, taken) if p > 0)
    of_parameters = sum(adapts_parameter(type(m).forward) for m in taken)
    steps = Counter(
        type(m).__name__
        for m in taken
        if not (adds_products(type(m).forward) or adapts_parameter(type(m).forward))
    )
    notes = [f"{len(layers)} adapter layers keep one copy of their input"] if layers else []
    notes += _lower_precision(facts, layers, low_precision)
    if of_parameters:
        notes.append(
            f"{of_parameters} of them adapt a parameter, of experts or a router, without making its sum"
        )
    notes += [
        f"{count} of them keep one bit more for each element of it: the mask of their dropout of {p:g}"
        for p, count in dropouts.items()
    ]
    notes += [
        f"{count} of them ({kind}) run base and adapter one after the other, as their own forward does"
        for kind, count in steps.items()
    ]
    notes += _of_another_dtype(facts, layers)
    return [
        *notes,
        *(f"{count} adapter layers are left alone: {why}" for why, count in reasons.items()),
    ]


def _of_another_dtype(facts: Facts, layers: tuple[str, ...]) -> list[str]:
    """Layers of 4 bits that are no one op, since their Linear multiplies in another dtype."""
    found: Counter[tuple[str, str]] = Counter()
    for name in layers:
        base: Any = getattr(facts.modules[name], "base_layer", None)
        call = next((one for one in facts.calls.get(name, ()) if one.inputs), None)
        if call is None or base is None or not is_four_bit(base):
            continue
        given = call.inputs[0].dtype
        own = base.compute_dtype or given
        if own != given and not (call.autocast and own.itemsize < given.itemsize):
            found[f"{given}"[6:], f"{own}"[6:]] += 1
    return [
        f"{count} of them run base and adapter one after the other: their Linear of 4 bits multiplies "
        f"{given} inputs in {own} (bnb_4bit_compute_dtype)"
        for (given, own), count in found.items()
    ]


def _lower_precision(facts: Facts, layers: tuple[str, ...], low_precision: bool) -> list[str]:
    lower = sum(low_precision and _is_wider(facts, name) for name in layers)
    said = (
        f"{lower} of them have an adapter in a wider dtype than their input (float32 beside bfloat16), and "
        "compute in the input's dtype (preset exact: in the adapter's)"
    )
    return [said] if lower else []


def _is_wider(facts: Facts, name: str) -> bool:
    """Whether an adapter's weights have more bits than the input of its layer."""
    given = [call.inputs[0].dtype.itemsize for call in facts.calls.get(name, ()) if call.inputs]
    own = [part.weight.dtype.itemsize for part in _active(facts.modules[name], "lora_A")]
    autocast = any(call.autocast for call in facts.calls.get(name, ()))
    return bool(given and own) and not autocast and max(own) > min(given)


def trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _active(layer: Any, table: str) -> list[Any]:
    """Entries of a layer's table of adapters, of those that are active."""
    entries = getattr(layer, table, {})
    return [entries[name] for name in layer.active_adapters if name in entries]


def _reason(layer: Any) -> str | None:
    """Why an adapter layer is left alone, or None."""
    if has_foreign_forward(layer):
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
