"""Norms over channels that wait until an activation, or a residual sum before one, reads them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowmem_patch.nn.channel_norms import is_readable
from lowmem_patch.strategies.protocol import Facts, forward_obstacle, once
from lowmem_patch.tracing.call_arguments import channel_norm_call
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op


class ResidualSum(NamedTuple):
    """``norm(x) + residual``.

    Attributes:
        norms: those that make one or both of the terms, and wait.
        residuals: the other term, if there is one.
    """

    norms: tuple[Op, ...]
    residuals: tuple[Tensor, ...]


@once
def normed_channels(facts: Facts) -> dict[int, Op]:
    """The norms over channels, by the ids of their outputs, of modules all of whose norms can wait: one
    activation is the only reader."""
    found: dict[str, list[Op]] = {}
    others: set[str] = set()
    for number, op in enumerate(facts.trace.ops):
        if op.role.has(Role.CHANNEL_NORM):
            found.setdefault(op.module, []).append(op)
            readers = facts.trace.consumers.get(id(op.outputs[0]), ())
            if len(readers) != 1 or not _can_wait(facts, op, number):
                others.add(op.module)
    return {
        id(op.outputs[0]): op for name, ops in found.items() if name not in others for op in ops
    }


def _can_wait(facts: Facts, norm: Op, number: int) -> bool:
    """Whether a norm over channels can be computed when its readers ask."""
    call = channel_norm_call(norm.name, norm.args, norm.kwargs)
    if call is None or norm.opaque or norm.compiled or not norm.module:
        return False
    if not is_readable(call.x, call.groups):
        return False
    return (
        id(norm.outputs[0]) not in facts.trace.outputs
        and facts.writes.later([call.x], number + 1) is None
        and forward_obstacle(facts, norm.module) is None
    )


@once
def residual_sums(facts: Facts) -> dict[int, ResidualSum]:
    """By the ids of what they make, sums of a norm over channels and a residual that autograd saves anyway,
    which one activation alone reads: ``relu(norm(f(x)) + x)``.

    What is computed again of a sum is no residual of the next block, which would be computed again of all
    the blocks before: of blocks behind one another, each second one is.
    """
    norms = _called_once(facts)
    found: dict[int, ResidualSum] = {}
    recomputed: set[int] = set()  # storages
    for number, op in enumerate(facts.trace.ops):
        activation = _activation_of_sum(facts, op)
        if activation is None:
            continue
        own = [norms[id(t)] for t in op.reads if id(t) in norms and _is_read_by(facts, t, op)]
        others = [t for t in op.reads if all(t is not norm.outputs[0] for norm in own)]
        held = all(_is_held(facts, t, op) and storage_key(t) not in recomputed for t in others)
        if own and held and facts.writes.later(others, number + 1) is None:
            found[id(op.outputs[0])] = ResidualSum(tuple(own), tuple(others))
            recomputed.add(storage_key(activation.outputs[0]))
    return found


def _called_once(facts: Facts) -> dict[int, Op]:
    """The norms over channels that can wait, each the only one of its module, by the ids of their outputs."""
    calls: dict[str, list[tuple[int, Op]]] = {}
    for number, op in enumerate(facts.trace.ops):
        if op.role.has(Role.CHANNEL_NORM):
            calls.setdefault(op.module, []).append((number, op))
    return {
        id(op.outputs[0]): op
        for (number, op), *more in calls.values()
        if not more and _can_wait(facts, op, number)
    }


def _activation_of_sum(facts: Facts, op: Op) -> Op | None:
    """The only reader of a sum of two tensors alike, where that is an activation."""
    if not op.role.has(Role.SUM | Role.SUM_IN_PLACE) or op.opaque or op.compiled:
        return None
    # a factor of the second
    if op.kwargs or len(op.reads) != 2 or op.reads[0] is op.reads[1]:
        return None
    first, second = ((t.shape, t.dtype, t.stride()) for t in op.reads)
    made = op.outputs[0]
    readers = [one for one in facts.trace.consumers.get(id(made), ()) if one is not op]
    alone = len(readers) == 1 and id(made) not in facts.trace.outputs
    return (
        readers[0] if first == second and alone and readers[0].role.has(Role.ACTIVATION) else None
    )


def _is_read_by(facts: Facts, output: Tensor, op: Op) -> bool:
    """Whether a sum alone reads a norm's output, or writes into it before anybody reads that."""
    first, *rest = facts.trace.consumers.get(id(output), (None,))
    return first is op and (not rest or (op.writes and op.outputs[0] is output))


def _is_held(facts: Facts, residual: Tensor, op: Op) -> bool:
    """Whether another reader saves a residual, or, once it is patched, what that is computed of."""
    readers = facts.trace.consumers.get(id(residual), ())
    return any(one is not op and facts.is_saved_for(one, residual) for one in readers)
