"""Who reads a site's output: the trace followed through row moves, casts and idle dropouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lowmem_patch.tracing.call_arguments import (
    WeightMatmul,
    are_row_numbers,
    argument,
    by_place,
    dropout_call,
    is_square,
    weight_matmul,
)
from lowmem_patch.tracing.dataflow import Path, first_input, forward
from lowmem_patch.tracing.op_roles import MATMULS, Role
from lowmem_patch.tracing.row_moves import moves_rows
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Call, Op, Trace

Use = Literal["linear", "product", "square", "autocast", "output", "write", "opaque", "other"]


@dataclasses.dataclass(frozen=True)
class LinearRef:
    """A Linear that reads a norm, by the names of its parameters in the model; ``transposed``: its weight is
    stored ``[in, out]`` (GPT-2's Conv1D) and not ``[out, in]``."""

    module: str
    weight: str
    bias: str | None
    transposed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Consumer:
    """One reader of a tensor.

    Attributes:
        use: ``linear`` (a Linear with a parameter as weight), ``product`` (times another tensor of
            that shape), ``square`` (times itself), ``autocast`` (another op that autocast casts),
            ``output`` (returned by the model), ``write`` (written in place), ``opaque`` (read where a
            deferred tensor would lose its gradient), or ``other``.
        text: how a report names it.
        linear: for ``linear``.
        tensor: what it reads, behind the moves.
        padded: a pad lies between, which adds rows of zeros for some input sizes.
        copied: the moves between made a copy.
        foreign_bias: the Linear adds a bias that is no parameter of the model.
        cast: it reads a cast of the tensor.
        reshaped: a view between changes what a row is (patch merging): the same memory, other channels.
    """

    use: Use
    text: str
    op: Op | None = None
    linear: LinearRef | None = None
    tensor: Tensor | None = None
    padded: bool = False
    copied: bool = False
    foreign_bias: bool = False
    cast: bool = False
    reshaped: bool = False


# what autocast runs in low precision
_LOW_PRECISION = Role.LINEAR | Role.CONVOLUTION | MATMULS | Role.FUSED_ATTENTION


def find_consumers(trace: Trace, tensors: Sequence[Tensor]) -> list[Consumer]:
    """Every consumer of any of ``tensors``, in the order of the forward."""
    found: list[Consumer] = []
    for path in forward(trace, tensors, _passes_on):
        reshaped = any(_reshapes(op) for op in path.ops)
        if id(path.end) in trace.outputs:
            found.append(Consumer("output", "the model's output"))
        for op in trace.consumers.get(id(path.end), ()):
            if not _passes_on(op, path.end):
                found.append(dataclasses.replace(_consumer(trace, op, path), reshaped=reshaped))
    return found


def read_compiled(
    trace: Trace, made: Sequence[Tensor], consumers: Iterable[Consumer]
) -> str | None:
    """Who reads ``made`` in a function that torch.compile compiled, as a reason; None: nobody does.

    Torch may refuse tensors of a subclass at such a function's first call (2.12 with backend ``aot_eager``).
    What the function makes itself may be deferred: the compiler sees it made.
    """
    readers = [one.op for one in consumers if one.op is not None and one.op.compiled]
    if not readers:
        return None
    inside = {id(tensor) for op in trace.ops if op.compiled for tensor in op.outputs}
    if inside.issuperset(map(id, made)):
        return None
    return f"is read by {readers[0].place}, in a function that torch.compile compiled"


def _passes_on(op: Op, tensor: Tensor) -> bool:
    """Whether an op only moves, casts or reshapes what it reads."""
    if op.writes or op.opaque or first_input(op) is not tensor:
        return False
    if op.role.has(Role.DROPOUT):
        return dropout_call(op.args, op.kwargs).p == 0
    if op.role.has(Role.CAST) and len(op.outputs) == 1 and op.outputs[0].is_floating_point():
        return True
    return _moves_rows(op) or _reshapes(op)


def _moves_rows(op: Op) -> bool:
    return moves_rows(op.func, op.args, op.kwargs, op.args[0], op.outputs)


def _reshapes(op: Op) -> bool:
    """Whether an op only reads the same memory in rows of another length."""
    if not op.role.has(Role.RESHAPE) or _moves_rows(op):
        return False
    source, output = op.args[0], op.outputs[0]
    return bool(output.dtype == source.dtype and storage_key(output) == storage_key(source))


def _worked_on(op: Op) -> object:
    """The first argument, given by its place or by name; None where there are no arguments."""
    given, _ = by_place(op.args, op.kwargs)
    return given[0] if given else None


def _consumer(trace: Trace, op: Op, path: Path) -> Consumer:
    """The consumer that an op is, at the end of a path."""
    tensor, where = path.end, op.place
    if op.writes and _worked_on(op) is tensor:
        return Consumer("write", where, op, tensor=tensor)
    if op.opaque:
        text = f"{where} (custom, scripted, a hook or without gradients)"
        return Consumer("opaque", text, op, tensor=tensor)
    linear = _linear_consumer(trace, op, path)
    if linear is not None:
        return linear
    if op.role.has(Role.DROPOUT):
        p = dropout_call(op.args, op.kwargs).p
        return Consumer("other", f"a dropout (p={p:g}) in {op.module}", op, tensor=tensor)
    if op.role.has(Role.PRODUCT):
        others = [arg for arg in op.args if isinstance(arg, Tensor) and arg is not tensor]
        if len(others) == 1 and others[0].shape == tensor.shape:
            return Consumer("product", where, op, tensor=tensor)
    if op.role.has(Role.POWER) and is_square(op.name, op.args, op.kwargs):
        return Consumer("square", where, op, tensor=tensor)
    use: Use = "autocast" if op.role.has(_LOW_PRECISION) else "other"
    cast = path.end.dtype != path.start.dtype
    return Consumer(use, where, op, tensor=tensor, cast=cast)


def _linear_consumer(trace: Trace, op: Op, path: Path) -> Consumer | None:
    """The consumer that a Linear is whose weight is a parameter; None for any other op."""
    matmul = matmul_of(op, path.end)
    weight = None if matmul is None else trace.parameters.get(id(matmul.weight))
    if matmul is None or weight is None or not op.role.has(Role.LINEAR):
        return None
    bias = trace.parameters.get(id(matmul.bias))
    foreign_bias = matmul.bias is not None and bias is None
    if foreign_bias and matmul.transposed:
        return None
    return Consumer(
        "linear",
        op.module,
        op,
        LinearRef(op.module, weight, bias, matmul.transposed),
        path.end,
        padded=any(between.role.has(Role.PAD) for between in path.ops),
        copied=storage_key(path.end) != storage_key(path.start),
        foreign_bias=foreign_bias,
        cast=path.end.dtype != path.start.dtype,
    )


def matmul_of(op: Op, tensor: Tensor | None) -> WeightMatmul | None:
    """The operands of a matmul whose weight is a tensor, where ``tensor`` is its input."""
    matmul = weight_matmul(op.name, op.args, op.kwargs)
    reads = matmul is not None and matmul.input is tensor and isinstance(matmul.weight, Tensor)
    return matmul if reads else None


def consumers_behind_dropouts(trace: Trace, consumers: list[Consumer]) -> list[Consumer]:
    """``consumers``, with those of a dropout's result in the place of the dropout.

    A Linear counts where it reads the very result, or a cast of it, which is what may wait there, and
    so does the caller who gets it; the dropout stays for any other consumer.
    """
    found: list[Consumer] = []
    for consumer in consumers:
        op = consumer.op
        if op is None or not op.role.has(Role.DROPOUT) or consumer.use != "other":
            found.append(consumer)
            continue
        following = find_consumers(trace, op.outputs)
        if not following:
            found.append(consumer)
        for behind in following:
            same = behind.tensor is not None and behind.tensor.shape == op.outputs[0].shape
            waits = behind.use in ("opaque", "output") or (
                same and weight_read_with(behind) is not None
            )
            found.append(behind if waits else consumer)
    return found


def weight_read_with(consumer: Consumer) -> Tensor | None:
    """The weight (a parameter, or an expert's part of one) of a matmul before which a deferred tensor
    may wait."""
    if consumer.op is None or consumer.use == "opaque":
        return None
    matmul = matmul_of(consumer.op, consumer.tensor)
    return None if matmul is None else matmul.weight


def weight_trains(consumer: Consumer) -> bool:
    """Whether it is such a matmul, and its weight's gradient asks for what it reads."""
    weight = weight_read_with(consumer)
    return weight is not None and weight.requires_grad


def feed_autocast(consumers: list[Consumer], around: set[bool]) -> bool:
    """Whether all that read a tensor are ops that autocast casts, where the tensor's maker itself runs:
    ``around`` says whether autocast was on at the maker's calls."""
    return bool(consumers) and all(
        c.use in ("linear", "autocast") and c.op is not None and {c.op.autocast} == around
        for c in consumers
    )


def saves_a_cast(op: Op) -> bool:
    """Whether it is a convolution of a weight that trains, and autocast casts its input for it: the cast is
    saved, or the input itself, where that waits."""
    padding = argument(op.args, op.kwargs, 4, "padding", 0)
    if not op.role.has(Role.CONVOLUTION) or isinstance(padding, str):
        return False
    x, weight = first_input(op), argument(op.args, op.kwargs, 1, "weight", None)
    trains = isinstance(weight, Tensor) and weight.requires_grad
    return x is not None and trains and x.dtype != op.outputs[0].dtype


def gathers_for_a_weight(trace: Trace, op: Op) -> bool:
    """Whether an op gathers rows by their numbers, which a matmul of a weight that trains would save."""
    if not op.role.has(Role.INDEX) or op.writes or op.opaque:
        return False
    if not are_row_numbers(op.args[1]):
        return False
    return any(map(weight_trains, find_consumers(trace, op.outputs)))


class Writes:
    """The ops of a trace that write in place, found by the memory that they write into, whichever view
    of it they are given."""

    def __init__(self, trace: Trace) -> None:
        self._found: list[tuple[int, Op, set[int]]] = []
        for number, op in enumerate(trace.ops):
            if op.writes:
                written = op.outputs if op.kwargs.get("out") is not None else (_worked_on(op),)
                places = {storage_key(t) for t in written if isinstance(t, Tensor)}
                self._found.append((number, op, places))

    def later(self, tensors: Sequence[Tensor], after: int) -> str | None:
        """The first op from number ``after`` on that writes into one of ``tensors``, as a report names it."""
        if not self._found:
            return None
        places = {storage_key(tensor) for tensor in tensors}
        for number, op, written in self._found:
            if number >= after and not places.isdisjoint(written):
                return op.place
        return None


class Reads:
    """The ops of a trace that read a tensor, found by the memory in which it lies."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._numbers = {id(op): number for number, op in enumerate(trace.ops)}
        self._ids: dict[int | None, dict[int, None]] = {}
        for op in trace.ops:
            for tensor in (*op.reads, *op.outputs):
                self._ids.setdefault(_place(tensor), {})[id(tensor)] = None

    def beside(self, call: Call) -> str | None:
        """Who reads the memory of a module's output behind the call, and not by way of the output, as a
        report names it."""
        place = _place(call.outputs[0])

        def is_view(op: Op, tensor: Tensor) -> bool:
            return any(_place(output) == place for output in op.outputs)

        own = {id(path.end) for path in forward(self._trace, call.outputs, is_view)}
        own -= set(map(id, call.inputs))  # which may be the output: nobody can tell them apart
        for key in self._ids.get(place, ()):
            if key in own:
                continue
            if key in self._trace.outputs:
                return "the caller of the model"
            for op in self._trace.consumers.get(key, ()):
                if self._numbers[id(op)] >= call.last_op:
                    return op.place
        return None


def _place(tensor: Tensor) -> int | None:
    """The memory in which a tensor lies; None inside torch.func's transforms, whose tensors have none."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return None if wrapped else storage_key(tensor)


def parameter_uses(trace: Trace) -> dict[str, list[Op]]:
    """The ops that read each parameter, by the parameter's name."""
    return {name: trace.consumers.get(key, []) for key, name in trace.parameters.items()}
