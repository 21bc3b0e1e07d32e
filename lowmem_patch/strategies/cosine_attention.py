"""cosine attention: normalised queries and keys are saved once, and no scores for the scale behind; exact."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.cosine_attention import CosineAttention, scales
from lowmem_patch.nn.modes import run_under
from lowmem_patch.strategies.protocol import Change, Facts, Found, forward_obstacle
from lowmem_patch.tracing.call_arguments import normalized_rows
from lowmem_patch.tracing.dataflow import backward, first_input, forward, only_consumer
from lowmem_patch.tracing.op_roles import REARRANGES, Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op, Trace


def find(facts: Facts, config: PatchConfig) -> Found:
    """The modules whose own forward does so."""
    if config.linear_inputs == "keep":
        return Found()
    rows = _unit_rows(facts)
    scores = dict(_scaled(facts, rows))
    patches = []
    for name in dict.fromkeys((*rows, *scores)):
        if forward_obstacle(facts, name, rows.get(name, 0) + scores.get(name, 0)) is None:
            autocast = all(call.autocast for call in facts.calls[name])
            settings = (CosineAttention, name in rows, name in scores, autocast)
            patches.append(Change(name, "cosine attention", run_under, settings))
    text = "cosine attention that saves q and k once, and no scores for their scale"
    return Found().take(patches, text)


def _unit_rows(facts: Facts) -> dict[str, int]:
    """Modules that normalise rows for matmuls alone, and the bytes of one such tensor."""
    found: dict[str, int] = {}
    others: set[str] = set()
    for op, alone in unit_rows(facts):
        if alone:
            found[op.module] = op.outputs[0].nbytes
        else:
            others.add(op.module)
    return {name: size for name, size in found.items() if name not in others}


def unit_rows(facts: Facts) -> Iterator[tuple[Op, bool]]:
    """The ops that normalise rows through which there is a gradient, and whether matmuls alone read these."""
    for op in _own_ops(facts, Role.UNIT_ROWS):
        if normalized_rows(op.args, op.kwargs) is not None and op.outputs[0].requires_grad:
            yield op, _is_for_matmuls(facts.trace, op)


def _is_for_matmuls(trace: Trace, op: Op) -> bool:
    """Whether matmuls alone read what an op gives, or another order of its elements, under its autocast."""
    forms = [path.end for path in forward(trace, op.outputs, _moves)]
    read = [(reader, form) for form in forms for reader in trace.consumers.get(id(form), ())]
    others = [reader for reader, form in read if not _moves(reader, form)]
    returned = any(id(form) in trace.outputs for form in forms)
    alike = all(one.role.has(Role.MATMUL) and one.autocast == op.autocast for one in others)
    return bool(others) and not returned and alike


def _moves(op: Op, tensor: Tensor) -> bool:
    # behind detach, nobody sees a write
    moves = op.role.has(REARRANGES) and not op.role.has(Role.DETACH)
    return moves and not op.writes and first_input(op) is tensor


def _scaled(facts: Facts, rows: Container[str]) -> Iterator[tuple[str, int]]:
    """Modules whose matmul's product is read by a product with a scale that trains, and its bytes."""
    for value, maker in scaled_scores(facts):
        # torch's matmul may have saved copies
        written = facts.writes.later(maker.reads, facts.trace.ops.index(maker))
        if written is None and all(_is_saved(facts, one, rows) for one in maker.reads):
            yield maker.module, value.nbytes


def scaled_scores(facts: Facts) -> Iterator[tuple[Tensor, Op]]:
    """Results of matmuls that are read by a product with a scale that trains alone, and the matmuls."""
    for op in _own_ops(facts, Role.PRODUCT):
        value = first_input(op)
        maker = None if value is None else facts.makers.get(id(value))
        if value is None or maker is None or len(op.args) != 2:
            continue
        if maker.module == op.module and maker.role.has(Role.MATMUL):
            scale = op.args[1]
            trains = isinstance(scale, Tensor) and scale.requires_grad and value.requires_grad
            if trains and scales(value, scale) and only_consumer(facts.trace, value) is op:
                yield value, maker


def _is_saved(facts: Facts, factor: Tensor, rows: Container[str]) -> bool:
    """Whether the memory of a matmul's factor is saved in any case: of some, torch saves a copy."""
    if storage_key(factor) in facts.storages:
        return True

    def source_of(op: Op, tensor: Tensor) -> Tensor | None:
        source = first_input(op)
        return source if source is not None and _moves(op, source) else None

    op = facts.makers.get(id(list(backward(facts.makers, factor, source_of))[-1]))
    return op is not None and op.role.has(Role.UNIT_ROWS) and op.module in rows


def _own_ops(facts: Facts, role: Role) -> Iterator[Op]:
    """The ops of a role that a module's own forward runs."""
    for op in facts.trace.ops:
        known = op.module and op.module in facts.calls
        if known and op.role.has(role) and not (op.opaque or op.compiled or op.writes):
            yield op
