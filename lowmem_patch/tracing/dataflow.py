"""A value followed through a trace: forward to the ops that read it, backward to what it was made from.

Both walks ask a step which ops only pass the value on; what that means is the caller's to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from lowmem_patch.tracing.row_moves import moves_rows
from lowmem_patch.tracing.trace import Op, Trace


class Path(NamedTuple):
    """The way of a value from the tensor ``start`` to the tensor ``end``, whose last step is ``op``."""

    start: Tensor
    end: Tensor
    op: Op | None = None
    before: Path | None = None

    @property
    def ops(self) -> Iterator[Op]:
        """The ops on the way, the last one first."""
        path: Path | None = self
        while path is not None and path.op is not None:
            yield path.op
            path = path.before


def forward(
    trace: Trace, tensors: Iterable[Tensor], passes_on: Callable[[Op, Tensor], bool]
) -> Iterator[Path]:
    """The ways to every tensor that holds a value of ``tensors``, breadth first and each tensor once, by ops
    whose outputs hold the value of a tensor that they read (``passes_on``)."""
    pending = deque(Path(tensor, tensor) for tensor in tensors)
    seen: set[int] = set()
    while pending:
        path = pending.popleft()
        if id(path.end) in seen:
            continue
        seen.add(id(path.end))
        yield path
        for op in trace.consumers.get(id(path.end), ()):
            if passes_on(op, path.end):
                pending.extend(Path(path.start, output, op, path) for output in op.outputs)


def backward(
    makers: Mapping[int, Op], tensor: Tensor, source: Callable[[Op, Tensor], Tensor | None]
) -> Iterator[Tensor]:
    """``tensor`` and what it was made from, as far as ``source(op, output)`` names an input; with a trace's
    `makers`."""
    following: Tensor | None = tensor
    while following is not None:
        yield following
        op = makers.get(id(following))
        following = None if op is None else source(op, following)


def makers(trace: Trace, counts: Callable[[Op], bool] | None = None) -> dict[int, Op]:
    """The op that made a tensor, or wrote into it last, by the tensor's id, among the ops that count."""
    ops = trace.ops if counts is None else filter(counts, trace.ops)
    return {id(output): op for op in ops for output in op.outputs}


def first_input(op: Op) -> Tensor | None:
    """The tensor that an op works on, where that is its first argument."""
    return op.args[0] if op.args and isinstance(op.args[0], Tensor) else None


def only_consumer(trace: Trace, tensor: Tensor) -> Op | None:
    """The op that reads ``tensor`` as its first argument, where nobody else reads or returns it."""
    consumers = trace.consumers.get(id(tensor), ())
    if len(consumers) != 1 or id(tensor) in trace.outputs:
        return None
    op = consumers[0]
    return op if first_input(op) is tensor and not op.writes and not op.opaque else None


def moved_from(op: Op, tensor: Tensor) -> Tensor | None:
    """What a view or another order of its rows was made of."""
    source = first_input(op)
    if source is None or op.writes or len(op.outputs) != 1:
        return None
    return source if moves_rows(op.func, op.args, op.kwargs, source, tensor) else None
