"""What a floor is made of, and what it is counted from: the norms and activations of an unpatched model,
whose outputs need not be saved, and the ops that autograd holds on to.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.planning.report import block_name
from lowmem_patch.strategies.cosine_attention import scaled_scores, unit_rows
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.strategies.rotary import turned_of
from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.call_arguments import is_square, zeroed_rows
from lowmem_patch.tracing.categories import CATEGORIES
from lowmem_patch.tracing.dataflow import Path, backward, first_input, makers
from lowmem_patch.tracing.op_roles import MATMULS, OF_ELEMENTS, OF_LOGITS, REARRANGES, Role, role_of
from lowmem_patch.tracing.probes import NormSpec, looks_like_norm
from lowmem_patch.tracing.saved_bytes import SavedStorage, storage_key
from lowmem_patch.tracing.shadow import tensors_in
from lowmem_patch.tracing.trace import Call, Op, Trace


@dataclasses.dataclass(frozen=True)
class FloorItem:
    """One tensor that the rule allows.

    Attributes:
        module: the path of the module that needs it first.
        category: one of ``lowmem_patch.tracing.categories.CATEGORIES``.
        bytes: its size.
    """

    module: str
    category: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes that the rule allows, item by item."""

    items: tuple[FloorItem, ...]

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def by_kind(self) -> dict[str, int]:
        sizes = Counter(dict.fromkeys(CATEGORIES, 0))
        for item in self.items:
            sizes[item.category] += item.bytes
        return dict(sizes)

    @property
    def by_block(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for item in self.items:
            sizes[block_name(item.module)] += item.bytes
        return dict(sizes)


class SiteCall(NamedTuple):
    """One call of a norm or an activation, as a module or a function, that has a gradient.

    ``dim`` is the dimension that a norm normalises.
    """

    module: str
    source: Tensor
    output: Tensor
    dim: int = -1


Sites = dict[int, SiteCall]  # by the id of the output


def find_sites(facts: Facts) -> tuple[Sites, Sites]:
    """Norms and activations, each module's and each function's."""
    norms: Sites = {}
    activations: Sites = {}

    def add(module: str, role: Role, source: Tensor, output: Tensor) -> None:
        if output.requires_grad and source is not output:
            sites = norms if role.has(Role.ROW_NORM) else activations
            sites[id(output)] = SiteCall(module, source, output, dims.get(module, -1))

    trace = facts.trace
    dims: dict[str, int] = {}
    covered: set[int] = set()
    roles: dict[str, Role] = {}
    for call in trace.calls:
        if call.name not in roles:
            roles[call.name] = _module_role(facts, call)
            spec = facts.norm(call.name) if roles[call.name].has(Role.ROW_NORM) else None
            dims[call.name] = spec.dim if isinstance(spec, NormSpec) else -1
        role = roles[call.name]
        if role and len(call.inputs) == len(call.outputs) == 1:
            covered.update(range(call.first_op, call.last_op))
            add(call.name, role, call.inputs[0], call.outputs[0])
    for number, op in enumerate(trace.ops):
        role, source = op.role & (Role.ACTIVATION | Role.ROW_NORM), first_input(op)
        if role and number not in covered and source is not None and len(op.outputs) == 1:
            add(op.module, role, source, op.outputs[0])
    return norms, activations


def kept_of(trace: Trace, makers: dict[int, Op], norm: SiteCall) -> list[Tensor]:
    """What a norm's backward can be computed of: the output, of a norm over channels the input as well, and
    that alone where a sum in place has taken the output's memory."""
    readers = trace.consumers.get(id(norm.source), ())
    if not any(op.module == norm.module and op.role.has(Role.CHANNEL_NORM) for op in readers):
        return [norm.output]
    made = makers.get(id(norm.output))
    overwritten = made is not None and made.role.has(Role.SUM_IN_PLACE)
    return [norm.source] if overwritten else [norm.output, norm.source]


def gated_norms(facts: Facts) -> dict[int, tuple[Tensor, ...]]:
    """x and the gate of each ``norm(x * act(gate))`` that one module computes, by the id of its output."""
    specs = {name: facts.gated_norm(name) for name in facts.leaves}
    return {
        id(call.outputs[0]): tuple(call.inputs)
        for call in facts.trace.calls
        if (spec := specs.get(call.name)) is not None and spec.gate_first
    }


def gamma_trains(norm: nn.Module) -> bool:
    """Whether the backward of a norm, or of what calls one as a function, needs z for gamma; a beta alone
    needs nothing."""
    known = norm._parameters
    if known.keys() & {"weight", "bias"}:
        return _trains(known.get("weight"))
    # a module's may have any name, and a function's be anywhere
    return not known or any(map(_trains, known.values()))


def _trains(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def makers_of(trace: Trace) -> dict[int, Op]:
    """`makers`, but for ops that overwrite whole rows with zeros: a mask of a byte a row does so again."""
    return makers(
        trace, lambda op: not op.writes or zeroed_rows(op.name, op.args, op.kwargs) is None
    )


def square_of(op: Op | None) -> Tensor | None:
    """The tensor of which an op makes the square; None of any other op."""
    if op is None or not op.role.has(Role.POWER) or not is_square(op.name, op.args, op.kwargs):
        return None
    return first_input(op)


def before_numbers(makers: dict[int, Op], tensor: Tensor, sites: tuple[Sites, ...]) -> Tensor:
    """What a tensor was made from by numbers (a clamp, ``x * 2``, ``1 + x``), short of these sites."""

    def source_of(op: Op, output: Tensor) -> Tensor | None:
        if len(op.reads) != 1 or op.writes or not op.role.has(OF_ELEMENTS):
            return None
        (source,) = op.reads
        same = source.shape == output.shape and source.dtype == output.dtype
        return source if same and not any(id(output) in found for found in sites) else None

    return list(backward(makers, tensor, source_of))[-1]


def of_repeated(makers: dict[int, Op], tensor: Tensor) -> tuple[Tensor, ...] | None:
    """x and the scores of ``x.repeat(...) * scores``: each expert reads all rows, with scores of its own."""
    op = makers.get(id(tensor))
    if op is None or not op.role.has(Role.PRODUCT) or len(op.reads) != 2:
        return None
    for rows, scores in (op.reads, op.reads[::-1]):
        repeat = makers.get(id(rows))
        if repeat is not None and repeat.role.has(Role.REPEAT):
            return *repeat.reads, scores
    return None


def of_residual(makers: dict[int, Op], tensor: Tensor, norms: Sites) -> tuple[Tensor, ...] | None:
    """The terms of ``x + norm(y)``, which one forward adds up; None where norms do not make all but one."""
    op = makers.get(id(tensor))
    if op is None:
        return None
    module, terms, pending = op.module, [], [tensor]
    while pending:
        term = pending.pop()
        op = makers.get(id(term))
        adds = op is not None and op.role.has(Role.SUM) and not op.writes and id(term) not in norms
        alike = op is not None and [read.shape for read in op.reads] == 2 * [term.shape]
        if op is not None and adds and alike and op.module == module:
            pending += op.reads
        else:
            terms.append(term)
    own = sum(id(term) not in norms for term in terms)
    return tuple(terms) if own <= 1 < len(terms) else None


def parts_of(makers: dict[int, Op], tensor: Tensor) -> Sequence[Tensor]:
    """What a tensor was concatenated of, or of whose halves it is the gated product."""
    op = makers.get(id(tensor))
    made = op is not None and op.role.has(Role.CONCATENATION | Role.GATED_HALVES)
    return op.reads if op is not None and made else ()


def before_parts(makers: dict[int, Op], tensor: Tensor) -> Tensor:
    """What ``tensor`` was made of with smaller tensors alone, which have a number for a row, say."""

    def source_of(op: Op, output: Tensor) -> Tensor | None:
        wholes = [t for t in op.reads if t.shape == output.shape]
        steps = op.role.has(OF_ELEMENTS) and not op.writes and len(op.reads) > 1
        return wholes[0] if steps and len(wholes) == 1 else None

    return list(backward(makers, tensor, source_of))[-1]


def of_one(makers: dict[int, Op], tensor: Tensor, sites: tuple[Sites, ...]) -> Tensor:
    """The one tensor of its shape, short of these sites, of which elementwise functions made ``tensor`` with
    smaller ones (a response norm, a learned scale and shift); ``tensor`` where they are several."""
    ends: dict[int, Tensor] = {}
    seen: set[int] = set()
    pending = [tensor]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        op = makers.get(id(value))
        wholes = [] if op is None else [t for t in op.reads if t.shape == tensor.shape]
        steps = op is not None and op.role.has(OF_ELEMENTS) and not op.writes and wholes
        if steps and not any(id(value) in found for found in sites):
            pending += wholes
        else:
            ends[id(value)] = value
    return next(iter(ends.values())) if len(ends) == 1 else tensor


def is_cast(storage: SavedStorage, softmax: SavedStorage, module: str) -> bool:
    """Whether a matmul saves a low-precision copy of what this softmax saves for its own backward."""
    saver = storage.savers[0]
    return (
        role_of(saver.function).has(MATMULS)
        and f"{module}.".startswith(f"{saver.module}.")
        and math.prod(storage.shape) == math.prod(softmax.shape)
        and storage.dtype.itemsize < softmax.dtype.itemsize
    )


def is_for_attention(trace: Trace, norm: SiteCall, saved: set[int]) -> bool:
    """Whether attention saves a norm's output in autocast's dtype, or what a rotary embedding, which has an
    inverse, made of it.

    Args:
        saved: keys of storages.
    """
    paths = turned_of(trace, norm.module, norm.output)
    if any(_is_cast_for(trace, path.end) for path in paths if _moves(path)):
        return True
    swaps = any(path.op is not None and path.op.role.has(Role.CONCATENATION) for path in paths)
    size, reached = norm.output.numel(), {id(path.end) for path in paths}
    ends = (
        path.end
        for path in paths
        if path.end.numel() == size and not any(_copies(op, reached) for op in path.ops)
    )
    return swaps and any(storage_key(end) in saved or _is_cast_for(trace, end) for end in ends)


def _moves(path: Path) -> bool:
    """Whether a value is in another order at most."""
    return all(op.role.has(REARRANGES) for op in path.ops)


def _is_cast_for(trace: Trace, tensor: Tensor) -> bool:
    """Whether attention saves a copy of a tensor that autocast makes."""
    return any(
        op.role.has(MATMULS | Role.FUSED_ATTENTION)
        and op.outputs[0].dtype.itemsize < tensor.dtype.itemsize
        for op in trace.consumers.get(id(tensor), ())
        if op.autocast
    )


def _copies(op: Op, turned: Set[int]) -> bool:
    """Whether it concatenates one tensor with nothing, as a cache does at first.

    A rotation of all columns may do so too, with what is left of its own input: no copy, as it is one op.

    Args:
        turned: ids of what is made of the norm's output.
    """
    whole = any(tensor.numel() == op.outputs[0].numel() for tensor in op.reads)
    others = any(id(tensor) not in turned for tensor in op.reads)
    return op.role.has(Role.CONCATENATION) and whole and others


def _module_role(facts: Facts, call: Call) -> Role:
    """What a module without children does to its one input: a norm, an activation or neither."""
    module, neither = facts.modules[call.name], Role(0)
    if call.name == "" or not is_leaf(module):
        return neither
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return neither
    if looks_like_norm(module):
        inside = facts.trace.ops[call.first_op : call.last_op]
        # a scale and a shift may be called a norm (MobileBERT)
        return neither if all(op.role.has(OF_ELEMENTS) for op in inside) else Role.ROW_NORM
    names = {name for name, _ in module.named_parameters()}
    if not names and call.outputs[0].shape == call.inputs[0].shape:
        return neither if facts.activation(call.name) is None else Role.ACTIVATION
    norm = bool(names) and isinstance(facts.norm(call.name), NormSpec)
    return Role.ROW_NORM if norm else neither


def live_ops(trace: Trace) -> list[Op]:
    """Ops through which an output of the model has a gradient: autograd lets go of what others saved."""
    # storages, so that a write into a view reaches what it is a view of
    reached: set[int] = set()
    for op in trace.ops:
        reached.update(_storages(t for t in op.outputs if id(t) in trace.outputs))
    found = []
    for op in reversed(trace.ops):
        made = _made(op)
        differentiable = any(tensor.requires_grad for tensor in made)
        if differentiable and not reached.isdisjoint(_storages(made)):
            reached.update(_storages(op.reads))
            found.append(op)
    return found[::-1]


def _made(op: Op) -> tuple[Tensor, ...]:
    """What an op returns or, with nothing to return, writes into."""
    return tuple(tensors_in(op.args[:1])) if op.writes and not op.outputs else op.outputs


def let_go(trace: Trace, live: Sequence[Op]) -> set[int]:
    """Keys of storages that only ops outside of ``live`` read or make.

    The trace holds the graphs of such ops, and autograd does not: GLM-Image compares a picture's features
    with codes, and takes the number of the nearest one.
    """
    held = {id(op) for op in live}
    keys: dict[bool, set[int]] = {True: set(), False: set()}
    for op in trace.ops:
        keys[id(op) in held].update(_storages((*op.reads, *op.outputs)))
    return keys[False] - keys[True]


def of_cosine_attention(facts: Facts) -> Iterator[int]:
    """Keys of storages that are saved to normalise queries and keys, or for a scale of scores, alone: q and k
    follow from what their matmul saves and the length of each row, and scores are its product."""
    rows = {op.module for op, alone in unit_rows(facts) if alone}
    scores = {storage_key(value) for value, _ in scaled_scores(facts)}
    for storage in facts.trace.saved.storages:
        roles = {role_of(saver.function) for saver in storage.savers}
        of_rows = all(role.has(Role.UNIT_ROWS) for role in roles)
        within = all(saver.module in rows for saver in storage.savers)
        scaled = storage.key in scores and all(role.has(Role.PRODUCT) for role in roles)
        if (of_rows and within) or scaled:
            yield storage.key


def forms_of_logits(makers: dict[int, Op], logits: Tensor) -> list[Tensor]:
    """Logits, and what they were made of, up to what their head gave: casts, parts, soft caps."""
    source = backward(
        makers, logits, lambda op, _: first_input(op) if op.role.has(OF_LOGITS) else None
    )
    return list(source)


def statistics_of(output: Tensor, dim: int = -1) -> int:
    """Bytes of one float32 number, whatever the dtype, for each row of a norm's output along ``dim``."""
    return torch.float32.itemsize * (output.numel() // max(1, output.shape[dim]))


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Keys of their storages; tensors inside of torch.vmap (masks of attention) have none."""
    return (
        storage_key(t) for t in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )
