"""Functions that a forward calls (``F.silu(x)``), found in a trace: activations, norms, and chains of
elementwise functions, some of which begin with a repeat or a gate of halves, or end in a concatenation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Set
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem_patch.functional import ActivationKind
from lowmem_patch.tracing.call_arguments import (
    CalledFunction,
    ElementwiseCall,
    called_function,
    elementwise_call,
    largest_shape,
)
from lowmem_patch.tracing.op_roles import OF_ELEMENTS, Role
from lowmem_patch.tracing.probes import NormSpec, match_function
from lowmem_patch.tracing.trace import Call, Op, Trace

_SITES = Role.ACTIVATION | Role.ROW_NORM
_STEPS = OF_ELEMENTS | Role.REPEAT | Role.CONCATENATION | Role.GATED_HALVES
# An op that makes at most this share of the numbers of what is made of it is no step, and its result is
# saved: a condition has one row for each image, and a reader makes all tokens. Small steps cost Python as
# much.
_SMALL = 1 / 128


class FunctionSite(NamedTuple):
    """A function that a module's forward calls, at one place or at several.

    Attributes:
        module: whose forward it is.
        function: what is called.
        kind: which activation it is, or what the norm computes.
        calls: each call, as if the function were a module.
    """

    module: str
    function: CalledFunction
    kind: ActivationKind | NormSpec
    calls: list[Call]

    @property
    def name(self) -> str:
        """As a report names it: ``layers.0.mlp.silu()``."""
        return f"{self.module}.{self.function}"

    def saved(self, trace: Trace) -> int:
        """Bytes that autograd holds for the function alone."""
        return sum(
            storage.bytes
            for storage in trace.saved.storages
            if all(
                (one.module, one.function) == (self.module, self.function.name)
                for one in storage.savers
            )
        )


def find_functions(trace: Trace, is_site: Callable[[str], bool]) -> dict[str, FunctionSite]:
    """The activations, and norms without weights, that are called as functions and have a gradient, by name;
    ``is_site``: whether a module is an activation or a norm as a whole, whatever it calls."""
    is_covered = cache(is_site)
    found: dict[tuple[str, CalledFunction], list[Call]] = {}
    kinds: dict[CalledFunction, ActivationKind | NormSpec | None] = {}
    for number, op in enumerate(trace.ops):
        # the model itself runs too many functions for a forward of ours around its own
        if not op.role.has(_SITES) or op.opaque or op.writes or not op.module:
            continue
        if is_covered(op.module):
            continue
        read = called_function(op.name, op.args, op.kwargs)
        if read is None or len(op.outputs) != 1 or not op.outputs[0].requires_grad:
            continue
        tensor, function = read
        call = Call(op.module, (tensor,), op.outputs, 1, number, number + 1, op.autocast)
        if function not in kinds:
            kinds[function] = match_function(op.func, function, call, trace)
        found.setdefault((op.module, function), []).append(call)
    sites = (
        FunctionSite(module, function, kind, calls)
        for (module, function), calls in found.items()
        if (kind := kinds[function]) is not None
    )
    return {site.name: site for site in sites}


@dataclasses.dataclass(eq=False)
class Chain:
    """Elementwise ops and concatenations of one module, each of which reads another or is read by one.

    Attributes:
        module: whose forward calls them, or modules in it that do nothing else.
        ops: by their numbers in the trace.
        calls: how they are called.
    """

    module: str
    ops: dict[int, Op] = dataclasses.field(default_factory=dict)
    calls: set[ElementwiseCall] = dataclasses.field(default_factory=set)

    @property
    def made(self) -> dict[int, Tensor]:
        """What the ops make, by id."""
        return {id(op.outputs[0]): op.outputs[0] for op in self.ops.values()}

    @property
    def sources(self) -> list[Tensor]:
        """What the ops read and none of them made."""
        made = self.made
        read = {id(t): t for op in self.ops.values() for t in op.reads}
        return [tensor for key, tensor in read.items() if key not in made]

    def makers_of(self, tensors: Iterable[Tensor]) -> tuple[list[Op], list[Tensor]]:
        """The ops that make these of tensors of their size, and those tensors."""
        makers = {id(op.outputs[0]): op for op in self.ops.values()}
        seen: dict[int, Tensor] = {}
        pending = list(tensors)
        while pending:
            tensor = pending.pop()
            if id(tensor) in seen:
                continue
            seen[id(tensor)] = tensor
            if (op := makers.get(id(tensor))) is not None:
                pending += [one for one in op.reads if one.shape == tensor.shape]
        ops = [makers[key] for key in seen if key in makers]
        return ops, [tensor for key, tensor in seen.items() if key not in makers]


def find_chains(
    trace: Trace,
    known: Set[int],
    caller: Callable[[str], str] = lambda name: name,
    norms: Set[int] = frozenset(),
    left: Set[int] = frozenset(),
) -> list[Chain]:
    """The chains of a trace, in the order in which they begin.

    Args:
        known: ids of tensors whose makers belong to no chain, nor do readers that make as large a one, but
            for concatenations.
        caller: the module whose functions those of a module count among, by their names.
        norms: ids of tensors that norms made, which save them.
        left: ids of tensors that are no chain's to make, though functions of one may read them.
    """
    chains: dict[int, Chain] = {}  # by the ids of what they made
    largest = _largest_made_of(trace)
    for number, op in enumerate(trace.ops):
        if not _may_be_step(op) or id(op.outputs[0]) in left:
            continue
        module = caller(op.module)
        own = {id(t): c for t in op.reads if (c := chains.get(id(t))) and c.module == module}
        call = _call(op, own.keys(), norms)
        made = op.outputs[0]
        small = made.numel() <= largest.get(id(made), 0) * _SMALL
        if call is None or small or not _belongs(op, own.keys(), known):
            continue
        chain, *others = dict.fromkeys(own.values()) or (Chain(module),)
        chain.ops[number] = op
        chain.calls.add(call)
        chains[id(op.outputs[0])] = chain
        for other in others:
            chain.ops |= other.ops
            chain.calls |= other.calls
            chains.update(dict.fromkeys(other.made, chain))
    for chain in set(chains.values()):
        chain.module = _innermost(chain)
    return sorted(set(chains.values()), key=lambda chain: min(chain.ops))


def _may_be_step(op: Op) -> bool:
    return bool(op.role.has(_STEPS) and op.outputs and op.module) and not (op.writes or op.opaque)


def maker_in(made: Set[int], norms: Set[int]) -> Callable[[Tensor], str | None]:
    """What `elementwise_call` asks of a trace: ``made`` are ids of what chains make."""

    def maker(tensor: Tensor) -> str | None:
        if id(tensor) in made:
            return "chain"
        return "norm" if id(tensor) in norms else None

    return maker


def _innermost(chain: Chain) -> str:
    """The smallest module whose forward calls all functions: no larger one need be looked at."""
    modules = {op.module for op in chain.ops.values()}
    return modules.pop() if len(modules) == 1 else chain.module


def _call(op: Op, own: Set[int], norms: Set[int]) -> ElementwiseCall | None:
    """How an op is called that may be one of a chain, None for any other; ``own``: ids of what it reads of
    chains."""
    # a mask's has no gradient
    asks = bool(own) or any(tensor.requires_grad for tensor in op.reads)
    if not asks or not _is_elementwise(op):
        return None
    return elementwise_call(op.name, op.args, op.kwargs, maker_in(own, norms))


def _belongs(op: Op, own: Set[int], known: Set[int]) -> bool:
    """Whether no other strategy takes an op that may read activations, which are made again.

    A product of one and a tensor of its shape is gated, which is known; a smaller tensor, as of squeeze and
    excitation, is no gate. All else belongs to a chain that it reads.
    """
    (output,) = op.outputs
    if op.role.has(Role.CONCATENATION):
        return bool(own) or any(id(tensor) in known for tensor in op.reads)
    if id(output) in known:
        return False
    if op.role.has(Role.PRODUCT):
        alike = len(op.reads) > 1 and all(tensor.shape == output.shape for tensor in op.reads)
        return not (alike and any(id(tensor) in known for tensor in op.reads))
    return bool(own) or not any(id(t) in known and t.shape == output.shape for t in op.reads)


def _largest_made_of(trace: Trace) -> dict[int, int]:
    """Of each tensor that elementwise functions read, by id: numbers of the largest that is made of it, in
    one step or many, so that all functions that make a condition are judged alike."""
    found: dict[int, int] = {}
    for op in reversed(trace.ops):
        if not op.role.has(_STEPS) or not op.outputs:
            continue
        made = op.outputs[0]
        size = max(made.numel(), found.get(id(made), 0))
        for tensor in op.reads:
            found[id(tensor)] = max(size, found.get(id(tensor), 0))
    return found


def _is_elementwise(op: Op) -> bool:
    """Whether the one output has the shape of the largest tensors that the op reads, and is none of
    torch.func's, which have no storage."""
    output, *others = op.outputs
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, op.outputs)):
        return False
    if op.role.has(Role.REPEAT | Role.CONCATENATION | Role.GATED_HALVES):
        lies = not op.role.has(Role.CONCATENATION) or all(t.is_contiguous() for t in op.reads)
        return output.is_floating_point() and lies
    if others or not (output.is_floating_point() or output.dtype == torch.bool):
        return False
    if op.role.has(Role.CAST) and len(op.reads) > 1:
        return False
    # no product of a row and a column
    return output.shape == largest_shape(op.reads) and any(
        tensor.shape == output.shape for tensor in op.reads
    )
