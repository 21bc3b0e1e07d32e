"""The activations of a model, and which of codes and recompute decides on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import ActivationKind
from lowmem_patch.strategies.norm_sites import PatchSite, makes_chains
from lowmem_patch.strategies.normed_channels import normed_channels, residual_sums
from lowmem_patch.strategies.protocol import Facts, Skip, forward_obstacle, once
from lowmem_patch.tracing.call_arguments import CalledFunction, zeroed_rows
from lowmem_patch.tracing.consumers import (
    Consumer,
    Use,
    consumers_behind_dropouts,
    find_consumers,
    read_compiled,
    saves_a_cast,
    weight_read_with,
    weight_trains,
)
from lowmem_patch.tracing.dataflow import first_input, forward
from lowmem_patch.tracing.functions import Chain, find_chains
from lowmem_patch.tracing.op_roles import NEEDS_TENSOR, Role
from lowmem_patch.tracing.probes import NormSpec, looks_like_activation, looks_like_norm
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.shadow import tensors_in
from lowmem_patch.tracing.trace import Call, Op

READS: tuple[Use, ...] = ("other", "autocast", "square")  # of the values
NOTHING_TO_GAIN = "nothing to gain: another op saves what it needs, or it saves nothing"


@dataclasses.dataclass(frozen=True)
class ActivationSite(PatchSite):
    """An activation that some strategy may patch.

    Attributes:
        consumers: who reads the output, also behind a dropout.
        in_place: it overwrites its input.
        gated: the output is multiplied with another tensor of its shape.
        linear: a Linear that trains, and reads the output.
        saves: what autograd saves of the activation, its ``input`` or its ``output``.
        reads: how many operators read the output as it is, where autograd saves it for one of them; for that
            one it can be computed again.
        recomputing_gains: fewer bytes are saved where the output is computed again.
        hook: what waits for the gradient of the output or of the gated product, or asks for the memory, as a
            report names it.
        chosen: the strategy that decides on it, ``codes`` or ``recompute``.
        normed: its input is the output of a norm over channels, which may be computed again as well.
        function: what is called, where the site is no module.
    """

    kind: ActivationKind
    in_place: bool
    gated: bool
    linear: Consumer | None
    hook: str | None
    saves: str
    reads: int
    recomputing_gains: bool
    chosen: str
    normed: bool
    function: CalledFunction | None = None


@once
def activation_sites(facts: Facts, config: PatchConfig) -> list[ActivationSite | Skip]:
    """Each activation of the model, in the order of the forward, or why no strategy may patch it."""
    found: list[ActivationSite | Skip] = []
    modules = [
        (n, facts.activation(n), None) for n in facts.leaves if n not in facts.foreign_kernels
    ]
    functions = [(name, called.kind, called.function) for name, called in facts.functions.items()]
    for name, kind, function in (*modules, *functions):
        if kind is None or isinstance(kind, NormSpec):
            continue
        site = _site(facts, name, kind, config, function)
        # a sigmoid whose output others save, too, is no row of a report
        is_row = function is None or site.recomputing_gains or facts.saved(name)
        if is_row and not _is_of_a_chain(facts, config, site):
            obstacle = _obstacle(facts, site, config)
            found.append(site if obstacle is None else site.skip(obstacle))
    return found


def _reads_norms(facts: Facts, config: PatchConfig, name: str, consumers: list[Consumer]) -> bool:
    """Whether all calls of an activation read what norms over channels made, or sums of them, and it makes
    no product."""
    if config.norms == "keep" or any(one.use in ("product", "square") for one in consumers):
        return False
    norms = normed_channels(facts).keys() | residual_sums(facts).keys()
    return all(call.inputs and id(call.inputs[0]) in norms for call in facts.calls_of(name))


def unknown_activations(facts: Facts) -> Iterator[Skip]:
    """Modules that look like activations, and are none that we know or may touch."""
    for name in facts.leaves:
        module = facts.modules[name]
        if looks_like_norm(module) or not looks_like_activation(module):
            continue
        if name in facts.foreign_kernels:
            yield Skip(name, "other", "runs a kernel of its own")
        elif facts.activation(name) is None:
            # with its parameters: LeakyReLU(negative_slope=0.1) is none of ours
            unknown = f"no step table for {str(module).removesuffix('()')}"
            yield Skip(name, "other", unknown if facts.saved(name) else NOTHING_TO_GAIN)
    for name, custom in facts.trace.custom.items():
        if not (facts.is_site(custom.module) or looks_like_norm(facts.modules[custom.module])):
            yield Skip(name, "other", "a custom autograd function: nobody sees what it computes")


def products(consumers: list[Consumer], use: Use = "product") -> list[Tensor]:
    """The gated products that are made of an output, or its squares."""
    return [t for c in consumers if c.use == use and c.op for t in c.op.outputs]


def are_weighed(facts: Facts, product: Tensor) -> bool:
    """Whether rows of a product are multiplied with a number for each of them that has a gradient, some of
    them perhaps overwritten with zeros before."""
    return any(
        factor.requires_grad and factor.shape == (*product.shape[:-1], 1)
        for path in forward(facts.trace, [product], _zeroes_rows)
        for op in facts.trace.consumers.get(id(path.end), ())
        if op.role.has(Role.PRODUCT)
        for factor in tensors_in(op.args)
    )


def _zeroes_rows(op: Op, tensor: Tensor) -> bool:
    return zeroed_rows(op.name, op.args, op.kwargs) is not None and op.args[0] is tensor


def consumers_of(facts: Facts, outputs: list[Tensor]) -> list[Consumer]:
    """Who reads an activation's output or a gated product, also behind a dropout."""
    return consumers_behind_dropouts(facts.trace, find_consumers(facts.trace, outputs))


def _site(
    facts: Facts,
    name: str,
    kind: ActivationKind,
    config: PatchConfig,
    function: CalledFunction | None = None,
) -> ActivationSite:
    consumers = consumers_of(facts, facts.outputs(name))
    rows = [consumer for consumer in consumers if not consumer.reshaped]  # what can be deferred
    hook = _hook(facts, consumers)
    in_place = _works_in_place(facts, name)
    of_output = _saves_output(facts, name, in_place)
    gated = any(consumer.use == "product" for consumer in rows)
    # a squared ReLU, written as two functions
    squares = products(rows, "square") if kind == "relu" else []
    linear = next(filter(weight_trains, (*rows, *consumers_of(facts, squares))), None)
    normed = _reads_norms(facts, config, name, rows)
    reads = 0 if squares else _reads(facts, name, rows, normed)
    gains = bool(gated or linear or reads)
    if not of_output:
        gains |= normed  # its input need not be saved, since that of the norm is, in any case
    elif not normed:
        # a Linear keeps a product that was made of it, or what a dropout made of it, but where one exact bit
        # takes less time
        behind = consumers_of(facts, products(rows) + squares)
        read = is_output(facts, name, linear)
        gains = any(map(weight_trains, behind)) or not (read or _is_exact(kind, config))
    gains &= hook is None
    chosen = _choose(
        config, kind, gains=gains, frozen=_is_read_frozen(facts, consumers),
        possible=gains and not (in_place and input_read_later(facts, name)),
    )  # fmt: skip
    return ActivationSite(
        name, kind, consumers, in_place, gated, linear, hook, "output" if of_output else "input",
        reads, gains, chosen, normed, function,
    )  # fmt: skip


def next_to_nothing(facts: Facts, gain: int, worth: float) -> str | None:
    """Why so few bytes, less than the share ``worth`` of all that is saved, need no patch; None for more.

    ``gain`` of one site or, where a deep model shall be patched as a shallow one, of all that are alike.
    """
    if gain >= worth * max(1, facts.trace.saved.activations):
        return None
    return f"next to nothing to gain: less than {100 * worth:g} % of all that is saved"


def is_frozen(consumer: Consumer) -> bool:
    """Whether it is a matmul of a weight that does not train."""
    return weight_read_with(consumer) is not None and not weight_trains(consumer)


def _is_read_frozen(facts: Facts, consumers: list[Consumer]) -> bool:
    """Whether such a matmul reads it, or what was concatenated of it and others."""
    joined = [
        output
        for consumer in consumers
        if consumer.op is not None and consumer.op.role.has(Role.CONCATENATION)
        for output in consumer.op.outputs
    ]
    behind = consumers_of(facts, joined) if joined else []
    return any(map(is_frozen, consumers)) or (bool(behind) and all(map(is_frozen, behind)))


def is_output(facts: Facts, name: str, consumer: Consumer | None) -> bool:
    """Whether a consumer reads an output of a module itself, and no other tensor that was made of it, as a
    dropout does."""
    places = {storage_key(tensor) for tensor in facts.outputs(name)}
    tensor = None if consumer is None else consumer.tensor
    return tensor is None or storage_key(tensor) in places


def _is_exact(kind: ActivationKind, config: PatchConfig) -> bool:
    """Whether codes give the very derivative."""
    return kind in STEP_TABLES and STEP_TABLES[kind][config.bits].exact


def _reads(facts: Facts, name: str, consumers: list[Consumer], normed: bool) -> int:
    """How many operators read the output of a call as it is, if autograd saves it for one of them, or a
    cast of it where the output waits for that one, as that of a norm does in any case."""
    made = facts.outputs(name)
    outputs = set(map(id, made))
    readers = [
        consumer.op
        for consumer in consumers
        if consumer.op is not None and consumer.use in READS and id(consumer.tensor) in outputs
    ]
    saved = any(facts.is_saved_for(op, *made) or (normed and saves_a_cast(op)) for op in readers)
    return -(-len(readers) // len(facts.calls_of(name))) if saved else 0


def _works_in_place(facts: Facts, name: str) -> bool:
    """Whether the module itself writes into its input."""
    return any(
        op.writes and first_input(op) is not None
        for call in facts.calls_of(name)
        for op in facts.trace.ops[call.first_op : call.last_op]
        if storage_key(call.inputs[0]) == storage_key(call.outputs[0])
    )


def input_read_later(facts: Facts, name: str) -> str | None:
    """Who reads what a module has written in place, and not by way of its output; as a report names it."""
    found = (facts.reads.beside(call) for call in facts.calls_of(name))
    return next((reader for reader in found if reader is not None), None)


def _saves_output(facts: Facts, name: str, in_place: bool) -> bool:
    """Whether torch's derivative of each call's last op is one of the output; in place, some save that, and
    some a copy of their input."""
    return (in_place and not facts.saved(name)) or all(
        any(
            op.role.has(Role.SAVES_OUTPUT) and any(made is call.outputs[0] for made in op.outputs)
            for op in facts.trace.ops[call.first_op : call.last_op]
        )
        for call in facts.calls_of(name)
    )


def _choose(
    config: PatchConfig, kind: ActivationKind, *, gains: bool, possible: bool, frozen: bool
) -> str:
    """The strategy that decides on an activation: by what recomputing gains, and whether it is possible.

    `auto` approximates where a ``frozen`` Linear reads the output, and nowhere else: only there have
    training runs shown what that costs.
    """
    if _is_exact(kind, config) and not possible:
        return "keep" if config.activations == "keep" else "codes"  # no approximation
    if config.activations == "auto":
        return "codes" if frozen and not gains and kind in STEP_TABLES else "recompute"
    return config.activations


def _hook(facts: Facts, consumers: list[Consumer]) -> str | None:
    """Who hangs a hook on the output or on the gated product, or asks for its memory: it cannot wait then."""
    behind = products(consumers) + products(consumers, "square")
    for consumer in consumers + (consumers_of(facts, behind) if behind else []):
        if consumer.op is not None and consumer.op.role.has(NEEDS_TENSOR):
            return consumer.text
    return None


def _is_of_a_chain(facts: Facts, config: PatchConfig, site: ActivationSite) -> bool:
    """Whether each gate and what it multiplies, with what is saved for the elementwise functions of the same
    forward that made them (``silu(gate.clamp(max=7)) * up``), hold more numbers than what they were made of
    (``x * torch.sigmoid(1.7 * x)``): a chain of these functions saves that alone."""
    if site.chosen != "recompute" or not site.gated:
        return False
    return all(
        any(
            call.first_op in chain.ops
            and makes_chains(facts, config, chain.module)
            and _saves_less(facts, chain, call)
            for chain in _all_chains(facts)
        )
        for call in facts.calls_of(site.name)
    )


@once
def _all_chains(facts: Facts) -> list[Chain]:
    return find_chains(facts.trace, frozenset(), facts.caller)


def _saves_less(facts: Facts, chain: Chain, call: Call) -> bool:
    """Whether a chain with a call of an activation in it needs less than the call's gated products do."""
    own = {id(tensor) for tensor in call.outputs}
    products = [op for op in chain.ops.values() if own & set(map(id, op.args))]
    read = [t for op in products for t in tensors_in(op.args) if id(t) not in own]
    kept = [*call.inputs, *read]
    before, sources = chain.makers_of(kept)
    saved = [
        tensor
        for op in before
        for tensor in op.reads
        if tensor.shape == op.outputs[0].shape and facts.is_saved_for(op, tensor)
    ]
    return _numbers(sources) < _numbers([*kept, *saved])


def _numbers(tensors: list[Tensor]) -> int:
    """How many numbers the storages of tensors hold; a cast of one holds as many."""
    storages = {storage_key(tensor): tensor for tensor in tensors}
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in storages.values())


def _obstacle(facts: Facts, site: ActivationSite, config: PatchConfig) -> str | None:
    if site.function is not None:
        read = {storage_key(t) for t in (*facts.outputs(site.name), *products(site.consumers))}
        gain = sum(facts.storages[key].bytes for key in read & facts.storages.keys())
        obstacle = forward_obstacle(facts, facts.functions[site.name].module, gain)
        if obstacle is not None:
            return obstacle
    if config.activations == "keep":
        return "activations: keep"
    writers = _writers(site.consumers)
    inside = site.in_place or not writers
    writer = facts.written(site.name, "outputs") if inside else writers[0]
    if writer is not None:
        return f"its output is written in place by {writer}"
    made = facts.outputs(site.name)
    behind = consumers_of(facts, products(site.consumers))
    for what, consumers in (("output", site.consumers), ("gated product", behind)):
        if (reader := read_compiled(facts.trace, made, consumers)) is not None:
            return f"its {what} {reader}"
    # whoever saves the product then saves the values, and views of it would not see the write
    writers = _writers(behind)
    return f"its gated product is written in place by {writers[0]}" if writers else None


def _writers(consumers: list[Consumer]) -> list[str]:
    return [consumer.text for consumer in consumers if consumer.use == "write"]
