"""attention layout: the output of fused attention lies in memory as the Linear behind it reads it, so that
the Linear saves no copy; exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.modes import HeadsLastQueries, has_heads_first, run_under
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.strategies.protocol import Change, Facts, Found
from lowmem_patch.strategies.rotary import rotating
from lowmem_patch.tracing.call_arguments import attention_call
from lowmem_patch.tracing.categories import Saver
from lowmem_patch.tracing.consumers import (
    consumers_behind_dropouts,
    find_consumers,
    weight_trains,
)
from lowmem_patch.tracing.dataflow import first_input, forward
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op, Trace

_FUSED = "scaled_dot_product_attention"
_COPIES_WHERE_NEEDED = Role.RESHAPE | Role.CONTIGUOUS


def find(facts: Facts, config: PatchConfig) -> Found:
    """The modules that run such attention, and of whose output a copy is saved for no other reason."""
    if config.attention != "fused":
        return Found()
    # as one op, a rotation that passes columns on by itself leaves q as it lay
    rotated = {name for name, one in rotating(facts, config).items() if one.partial}
    names: dict[str, None] = {}
    for op in facts.trace.ops:
        module = facts.modules.get(op.module)
        if module is None or op.module in rotated or has_foreign_forward(module):
            continue
        if _saves_once(op, facts.savers_of) and _is_copied(facts.trace, op):
            names[op.module] = None
    heads_first = {op.module for op in facts.trace.ops if _needs_heads_first(facts.trace, op)}
    patches = [
        Change(name, "attention layout", run_under, (HeadsLastQueries,))
        for name in names
        # no output within its forward must have its heads first
        if not any(f"{one}.".startswith(f"{name}.") for one in heads_first)
    ]
    text = "attention whose output lies as the Linear behind it reads it, for memory"
    return Found().take(patches, text)


def _saves_once(op: Op, savers_of: Callable[[Tensor], Iterable[Saver]]) -> bool:
    """Whether an op is fused attention of queries with the heads first that nobody else saves.

    Queries that others save, too, would be saved twice, once in either order. Attention that is computed by
    matmuls saves no output.
    """
    if op.name != _FUSED or op.opaque:
        return False
    q, fused = attention_call(op.name, op.args, op.kwargs).query, {op.name}
    others = (t for t in (*op.args, *op.kwargs.values()) if isinstance(t, Tensor) and t is not q)
    if not has_heads_first(q) or storage_key(q) in map(storage_key, others):
        return False
    by_q, by_output = ({one.function for one in savers_of(read)} for read in (q, op.outputs[0]))
    # under autocast a cast of q is saved
    return by_q <= fused and by_output == fused


def _needs_heads_first(trace: Trace, op: Op) -> bool:
    """Whether the output of fused attention is viewed in a shape that only memory with the heads first has
    without a copy."""
    output = op.outputs[0] if op.name == _FUSED else None
    if output is None or not has_heads_first(output):
        return False
    b, h, s, d = output.shape
    heads_last = torch.empty((b, s, h, d), device="meta").transpose(1, 2)
    return any(
        reader.role.has(Role.RESHAPE)
        and _is_view(reader, path.end)
        and (path.end.shape, path.end.stride()) == (output.shape, output.stride())
        and not _can_be_viewed(heads_last, reader.outputs[0].shape)
        for path in forward(trace, [output], _is_view)
        for reader in trace.consumers.get(id(path.end), ())
    )


def _can_be_viewed(tensor: Tensor, shape: torch.Size) -> bool:
    try:
        tensor.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def _is_view(op: Op, tensor: Tensor) -> bool:
    """Whether an op gives the same memory, and its only output is of the tensor."""
    same = first_input(op) is tensor and not op.writes and not op.opaque
    return same and len(op.outputs) == 1 and storage_key(op.outputs[0]) == storage_key(tensor)


def _is_copied(trace: Trace, op: Op) -> bool:
    """Whether a matmul of a weight that trains saves a copy of the output with its heads last."""
    output = op.outputs[0]
    b, h, s, d = zip(output.shape, output.stride(), strict=True)
    for path in forward(trace, [output], _is_view):
        if tuple(zip(path.end.shape, path.end.stride(), strict=True)) != (b, s, h, d):
            continue
        for reader in trace.consumers.get(id(path.end), ()):
            copies = reader.role.has(_COPIES_WHERE_NEEDED) and not _is_view(reader, path.end)
            if copies and not reader.opaque and _is_saved(trace, reader.outputs[0]):
                return True
    return False


def _is_saved(trace: Trace, copy: Tensor) -> bool:
    """Whether a matmul of a weight that trains reads it, or a gate is multiplied with it."""
    # this very memory, or a cast of it, and no copy in yet another order
    consumers = [
        one
        for one in find_consumers(trace, [copy])
        if one.tensor is not None
        and (storage_key(one.tensor) == storage_key(copy) or one.tensor.dtype != copy.dtype)
    ]
    behind = consumers_behind_dropouts(trace, consumers)
    return any(weight_trains(one) or one.use == "product" for one in behind)
