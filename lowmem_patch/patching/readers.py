"""Who reads a site's output: the trace followed through row moves, casts and idle dropouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor, nn

from lowmem_patch.dropouts import dropout_call
from lowmem_patch.patching.sites import LinearRef
from lowmem_patch.patching.trace import Op, Trace
from lowmem_patch.rows import moves_rows, pads
from lowmem_patch.saved import storage_key

__all__ = [
    "Reader",
    "Writes",
    "behind_dropouts",
    "called_with",
    "find_readers",
    "parameter_uses",
    "weight_read_with",
    "weight_trains",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """One reader of a tensor.

    Attributes:
        kind: ``linear`` (a Linear with a parameter as weight), ``product`` (times another tensor of
            that shape), ``autocast`` (another op that autocast casts), ``output`` (returned by the
            model), ``write`` (written in place), ``opaque`` (read where a deferred tensor would lose
            its gradient), or ``other``.
        text: how a report names it.
        linear: for ``linear``.
        tensor: what it reads, behind the moves.
        padded: a pad lies between, which adds rows of zeros for some input sizes.
        copied: the moves between made a copy.
        cast: it reads a cast of the tensor.
        foreign_bias: the Linear adds a bias that is no parameter of the model.
        reshaped: a view between changes what a row is (patch merging): the same memory, other channels.
    """

    kind: str
    text: str
    op: Op | None = None
    linear: LinearRef | None = None
    tensor: Tensor | None = None
    padded: bool = False
    copied: bool = False
    foreign_bias: bool = False
    cast: bool = False
    reshaped: bool = False


_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten"))
_CASTS = frozenset(("to", "type_as", "type", "float", "half", "bfloat16", "double"))
_AUTOCAST = frozenset(
    ("matmul", "__matmul__", "bmm", "mm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "linear",
     "scaled_dot_product_attention", "multi_head_attention_forward")
)  # fmt: skip


def find_readers(trace: Trace, tensors: list[Tensor], model: nn.Module) -> list[Reader]:
    """Every reader of any of ``tensors``, in the order of the forward."""
    found: list[Reader] = []
    pending = [(tensor, tensor, False, False) for tensor in tensors]
    seen: set[int] = set()
    while pending:
        tensor, origin, padded, reshaped = pending.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in trace.outputs:
            found.append(Reader("output", "the model's output"))
        for op in trace.readers.get(id(tensor), ()):
            following = _follow(op, tensor)
            if following is not None:
                pads_too = padded or pads(op.func)
                pending.extend((output, origin, pads_too, reshaped) for output in following)
            elif _reshapes(op, tensor):
                pending.append((op.outputs[0], origin, padded, True))
            else:
                reader = _reader(trace, op, tensor, origin, padded, model)
                found.append(dataclasses.replace(reader, reshaped=reshaped))
    return found


def _follow(op: Op, tensor: Tensor) -> tuple[Tensor, ...] | None:
    if op.writes or op.opaque or not op.args or op.args[0] is not tensor:
        return None
    if op.name == "dropout":
        return op.outputs if dropout_call(op.args, op.kwargs).p == 0 else None
    if op.name in _CASTS and len(op.outputs) == 1 and op.outputs[0].is_floating_point():
        return op.outputs
    output = op.outputs if len(op.outputs) > 1 else op.outputs[0]
    return op.outputs if moves_rows(op.func, op.args, op.kwargs, tensor, output) else None


def _reshapes(op: Op, tensor: Tensor) -> bool:
    """Whether the op only reads the same memory in rows of another length."""
    if op.name not in _RESHAPES or op.writes or op.opaque or op.args[0] is not tensor:
        return False
    output = op.outputs[0]
    return output.dtype == tensor.dtype and storage_key(output) == storage_key(tensor)


def _reader(
    trace: Trace, op: Op, tensor: Tensor, origin: Tensor, padded: bool, model: nn.Module
) -> Reader:
    where = _place(op)
    copied = storage_key(tensor) != storage_key(origin)
    if op.writes and op.args and op.args[0] is tensor:
        return Reader("write", where, op, tensor=tensor)
    if op.opaque:
        return Reader(
            "opaque", f"{where} (custom, scripted, a hook or without gradients)", op, tensor=tensor
        )
    if op.name == "linear" and op.args and op.args[0] is tensor:
        weight = op.args[1] if len(op.args) > 1 else op.kwargs.get("weight")
        bias = op.args[2] if len(op.args) > 2 else op.kwargs.get("bias")
        name = trace.parameters.get(id(weight))
        if name is not None:
            bias_name = trace.parameters.get(id(bias))
            ref = LinearRef(op.module, name, bias_name)
            foreign = bias is not None and bias_name is None
            cast = tensor.dtype != origin.dtype
            return Reader("linear", op.module, op, ref, tensor, padded, copied, foreign, cast)
    if op.name == "addmm" and len(op.args) == 3 and op.args[1] is tensor:
        weight_name, bias_name = (trace.parameters.get(id(op.args[i])) for i in (2, 0))
        if weight_name is not None and bias_name is not None:
            ref = LinearRef(op.module, weight_name, bias_name, transposed=True)
            return Reader("linear", op.module, op, ref, tensor, padded, copied)
    if op.name in ("mul", "__mul__", "__rmul__"):
        others = [arg for arg in op.args if isinstance(arg, Tensor) and arg is not tensor]
        if len(others) == 1 and others[0].shape == tensor.shape:
            return Reader("product", where, op, tensor=tensor)
    if op.name == "dropout":
        p = dropout_call(op.args, op.kwargs).p
        return Reader("other", f"a dropout (p={p:g}) in {op.module}", op, tensor=tensor)
    return Reader("autocast" if op.name in _AUTOCAST else "other", where, op, tensor=tensor)


def behind_dropouts(trace: Trace, readers: list[Reader], model: nn.Module) -> list[Reader]:
    """``readers``, with those of a dropout's result in the place of the dropout.

    A Linear counts where it reads the very result, or a cast of it, which is what may wait there, and
    so does the caller who gets it; the dropout stays for any other reader.
    """
    found: list[Reader] = []
    for reader in readers:
        op = reader.op
        if op is None or op.name != "dropout" or reader.kind != "other":
            found.append(reader)
            continue
        following = find_readers(trace, list(op.outputs), model)
        if not following:
            found.append(reader)
        for behind in following:
            same = behind.tensor is not None and behind.tensor.shape == op.outputs[0].shape
            waits = behind.kind in ("opaque", "output") or (
                same and weight_read_with(behind) is not None
            )
            found.append(behind if waits else reader)
    return found


# matmuls that can keep what their input is recomputed from, and where their weight stands
_WEIGHT_PLACES = {"linear": (0, 1), "addmm": (1, 2), "grouped_mm": (0, 1), "_grouped_mm": (0, 1)}


def weight_read_with(reader: Reader) -> Tensor | None:
    """The weight (a parameter, or an expert's part of one) of a matmul before which a deferred tensor
    may wait."""
    op = reader.op
    if op is None or reader.kind == "opaque" or op.name not in _WEIGHT_PLACES:
        return None
    first, second = _WEIGHT_PLACES[op.name]
    if len(op.args) <= second or op.args[first] is not reader.tensor:
        return None
    weight = op.args[second]
    return weight if isinstance(weight, Tensor) else None


def weight_trains(reader: Reader) -> bool:
    """Whether it is such a matmul, and its weight's gradient asks for what it reads."""
    weight = weight_read_with(reader)
    return weight is not None and weight.requires_grad


class Writes:
    """The ops of a trace that write in place, found by the memory that they write into, whichever view
    of it they are given."""

    def __init__(self, trace: Trace) -> None:
        self._found: list[tuple[int, Op, set[int]]] = []
        for number, op in enumerate(trace.ops):
            if op.writes:
                written = op.outputs if "out" in op.kwargs else op.args[:1]
                places = {storage_key(t) for t in written if isinstance(t, Tensor)}
                self._found.append((number, op, places))

    def later(self, tensors: Sequence[Tensor], after: int) -> str | None:
        """The first op from number ``after`` on that writes into one of ``tensors``, as a report names it."""
        if not self._found:
            return None
        places = {storage_key(tensor) for tensor in tensors}
        for number, op, written in self._found:
            if number >= after and not places.isdisjoint(written):
                return _place(op)
        return None


def _place(op: Op) -> str:
    return f"{op.name} in {op.module}" if op.module else op.name


def called_with(trace: Trace, tensors: set[int], apart: Sequence[str]) -> tuple[str, ...]:
    """Modules that are called with one of ``tensors`` (ids), but for those inside of ``apart``."""
    prefixes = tuple(f"{name}." for name in apart)
    names = (call.name for call in trace.calls if not tensors.isdisjoint(map(id, call.inputs)))
    return tuple(name for name in dict.fromkeys(names) if not name.startswith(prefixes))


def parameter_uses(trace: Trace) -> dict[str, list[Op]]:
    """The ops that read each parameter, by the parameter's name."""
    return {name: trace.readers.get(key, []) for key, name in trace.parameters.items()}
