"""rotary: q and k are rotated by halves in one op, where a probe of the module's function says that it can
stand for it. A norm in front of it saves what it gives, as attention does: `lowmem_patch.nn.turned_norms`."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.nn.rotary import Rotation, RotationOfOne, forward_of_class, use_rotary
from lowmem_patch.strategies.protocol import Change, Facts, Found, once
from lowmem_patch.tracing.consumers import feed_autocast, find_consumers
from lowmem_patch.tracing.dataflow import Path, backward, first_input, forward
from lowmem_patch.tracing.isolation import NoForeignKernels
from lowmem_patch.tracing.observers import FunctionObserver
from lowmem_patch.tracing.op_roles import (
    OF_ELEMENTS,
    REARRANGES,
    SELECTS,
    Role,
    function_name,
    role_of,
)
from lowmem_patch.tracing.trace import Op, Trace

_REQUIRED = ["q", "k", "cos", "sin"]
_REQUIRED_OF_ONE = ["x", "cos", "sin"]
_OPTIONAL = ("position_ids", "unsqueeze_dim")
_TOLERANCE = 1e-5  # some compute in float32 whatever they are given
_LENGTH, _HEADS, _WIDTH = 5, 3, 8
_DIMS = (1, 2)  # which the heads may be, of four
_NAMED = 3
# how rotary embeddings are written, and heads laid out
_TURNS = OF_ELEMENTS | REARRANGES | SELECTS | Role.CONCATENATION


def _looked_up(module: nn.Module) -> dict[str, Any]:
    """What the forward of the module's class looks up in its file under the name of a rotary function."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return {}
    names = (name for name in forward.__code__.co_names if "rotary" in name)
    found = ((name, forward.__globals__.get(name)) for name in names)
    return {name: f for name, f in found if callable(f) and not isinstance(f, type)}


def find(facts: Facts, config: PatchConfig) -> Found:
    """The modules among those that ran whose rotation can be one op."""
    rotations = rotating(facts, config)
    patches = [Change(name, "rotary", use_rotary, (one,)) for name, one in rotations.items()]
    note = _note(facts, rotations) if config.attention == "fused" else None
    return Found([*patches], notes=[] if note is None else [note])


@once
def rotating(facts: Facts, config: PatchConfig) -> dict[str, Rotation]:
    """These modules' rotations, by name."""
    rotations: dict[str, Rotation] = {}
    if config.attention != "fused":
        return rotations
    for name in facts.calls:
        module = facts.modules[name]
        if has_foreign_forward(module):
            continue
        for called, function in _looked_up(module).items():
            rotation = _match(called, function)
            forward = forward_of_class(module)
            # a copy of its file is where nobody would look for what forward writes
            if rotation is not None and forward is not None and not _writes_names(forward):
                feeds = _feeds_autocast(facts, name, rotation)
                rotations[name] = dataclasses.replace(rotation, feeds_autocast=feeds)
    return rotations


def _feeds_autocast(facts: Facts, name: str, rotation: Rotation) -> tuple[bool, bool]:
    """Whether ops that autocast casts alone read what a module's rotary embedding makes of q, and of k."""
    made = facts.makers
    calls = facts.calls_of(name)
    around = {call.autocast for call in calls}
    fed = [
        feed_autocast(find_consumers(facts.trace, _with_rest(facts, made, op).outputs), around)
        for op in facts.ops_of(name)
        if op.module == name and _is_turn(made, op)
    ]
    if isinstance(rotation, RotationOfOne):
        every = bool(fed) and all(fed)
        return every, every
    if len(fed) != 2 * len(calls) or not _sums_q_first(rotation):
        return False, False
    return all(fed[::2]), all(fed[1::2])


class _Sums(FunctionObserver):
    """Whether each sum of a function has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if role_of(function_name(func)).has(Role.SUM):
            self.found.append(result.requires_grad)
        return result


@cache
def _sums_q_first(rotation: Rotation) -> bool:
    """Whether the function turns its first argument before the other one."""
    q, k, cos, sin = _example(rotation.heads_dim, _WIDTH)
    with torch.enable_grad(), NoForeignKernels(), _Sums() as sums:
        rotation.function(q.requires_grad_(), k, cos, sin)
    return bool(sums.found == [True, False])


def _is_turn(made: Mapping[int, Op], op: Op) -> bool:
    """Whether an op adds x cos and rotate_half(x) sin, the last step of a rotation of these columns."""
    products = [made.get(id(tensor)) for tensor in op.reads]
    if not op.role.has(Role.SUM) or len(products) != 2:
        return False
    one, other = (
        product.reads if product is not None and product.role.has(Role.PRODUCT) else []
        for product in products
    )
    return _reads_halves(made, one, of=other) or _reads_halves(made, other, of=one)


def _with_rest(facts: Facts, made: Mapping[int, Op], turn: Op) -> Op:
    """The op that puts the columns that were turned beside others of the same tensor, if there is one; else
    ``turn``. What a cache concatenates is none."""
    output = turn.outputs[0]
    readers = facts.trace.consumers.get(id(output), ())
    if len(readers) != 1 or id(output) in facts.trace.outputs:
        return turn
    (reader,) = readers
    of = {
        id(whole) for one in turn.reads for x in made[id(one)].reads for whole in _wholes(made, x)
    }
    beside = [tensor for tensor in reader.reads if tensor is not output]
    joins = reader.role.has(Role.CONCATENATION) and reader.module == turn.module
    same = all(not of.isdisjoint(map(id, _wholes(made, tensor))) for tensor in beside)
    return reader if joins and same else turn


def _wholes(made: Mapping[int, Op], tensor: Tensor) -> list[Tensor]:
    """What a tensor is a selection of."""

    def source_of(op: Op, _: Tensor) -> Tensor | None:
        return first_input(op) if op.role.has(SELECTS) else None

    return list(backward(made, tensor, source_of))[1:]


def _reads_halves(made: Mapping[int, Op], factors: list[Tensor], of: list[Tensor]) -> bool:
    """Whether one of the factors is made of halves of one ``of`` those, in the other order."""

    def source_of(maker: Op, _: Tensor) -> Tensor | None:
        return first_input(maker) if maker.role.has(SELECTS | Role.NEGATION) else None

    makers_of = (made.get(id(factor)) for factor in factors)
    halves = [maker.reads for maker in makers_of if maker and maker.role.has(Role.CONCATENATION)]
    wholes = {id(tensor) for tensor in of}
    return len(halves) == 1 and all(
        any(id(source) in wholes for source in backward(made, half, source_of))
        for half in halves[0]
    )


def turned_of(trace: Trace, norm: str, output: Tensor) -> list[Path]:
    """The ways from the output of a norm, a module of this name, to all that a rotary embedding in the module
    around makes of it."""
    around = norm.rpartition(".")[0]

    def passes_on(op: Op, _: Tensor) -> bool:
        inside = f"{op.module}.".startswith(f"{around}.")
        return inside and not op.writes and op.role.has(_TURNS)

    return list(forward(trace, [output], passes_on))


def is_turned(facts: Facts, config: PatchConfig, norm: str, outputs: list[Tensor]) -> bool:
    """Whether a rotary embedding that runs as one op may read a norm, and nobody writes into its results."""
    if norm.rpartition(".")[0] not in rotating(facts, config):
        return False
    made = (path.end for output in outputs for path in turned_of(facts.trace, norm, output))
    readers = (op for one in made for op in facts.trace.consumers.get(id(one), ()))
    return not any(op.writes for op in readers)


def _writes_names(forward: Any) -> bool:
    return any(
        step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(forward)
    )


def _note(facts: Facts, rotations: Mapping[str, Rotation]) -> str | None:
    """How many modules run their rotation as one op, and which others rotate otherwise."""
    others = [n for n in facts.calls if n not in rotations and _looked_up(facts.modules[n])]
    named = ", ".join(others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
    parts = []
    if rotations:
        parts.append(f"rotary embeddings that run as one op, for speed: {len(rotations)}")
    if others:
        parts.append(
            f"rotary embeddings left alone, no rotation by halves or not called plainly: {named}"
        )
    return "; ".join(parts) or None


@cache
def _match(name: str, function: Any) -> Rotation | None:
    # `kernels` makes a module of a function that it may exchange
    plain = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(plain).parameters
    kind = RotationOfOne if "x" in parameters else Rotation
    optional = _optional(parameters, _REQUIRED_OF_ONE if kind is RotationOfOne else _REQUIRED)
    if optional is None:
        return None
    of_both = partial(_of_both, function) if kind is RotationOfOne else function
    if "unsqueeze_dim" in optional:
        fitting = [dim for dim in _DIMS if _agrees(of_both, dim, _WIDTH, unsqueeze_dim=dim)]
        default = parameters["unsqueeze_dim"].default
    else:
        fitting = [dim for dim in _DIMS if _agrees(of_both, dim, _WIDTH)]
        default = fitting[0] if len(fitting) == 1 else 0
    if default not in fitting or ("unsqueeze_dim" in optional and len(fitting) != 2):
        return None
    return kind(
        name,
        function,
        optional,
        default,
        _unbatched(of_both),
        partial=_agrees(of_both, default, _WIDTH // 2),
        keeps_dtype=_keeps_dtype(of_both, default),
    )


def _unbatched(function: Any) -> int:
    """The dimension of the heads of tensors without a batch, counted as if they had one; 0 for none."""
    return next((dim for dim in _DIMS if _agrees(function, dim, _WIDTH, batched=False)), 0)


def _optional(
    parameters: Mapping[str, inspect.Parameter], required: list[str]
) -> tuple[str, ...] | None:
    """Which known parameters with defaults stand behind the ``required`` ones; None where others do."""
    names = tuple(parameters)
    optional = names[len(required) :]
    known = list(names[: len(required)]) == required and set(optional) <= set(_OPTIONAL)
    given = any(parameters[extra].default is inspect.Parameter.empty for extra in optional)
    return optional if known and not given else None


def _of_both(function: Any, q: Tensor, k: Tensor, *rest: Any, **named: Any) -> tuple[Any, Any]:
    """What a function of one tensor makes of q and of k."""
    return function(q, *rest, **named), function(k, *rest, **named)


def _example(heads_dim: int, rotated: int) -> tuple[Tensor, ...]:
    """q, k, cos, sin in float64; the halves of cos and sin differ. No random numbers are drawn."""

    def values(seed: float, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        numbers = torch.arange(count, dtype=torch.float64, device="cpu")
        return (numbers * seed).sin().reshape(shape)

    q, k = values(1.7, 2, _HEADS, _LENGTH, _WIDTH), values(2.3, 2, 1, _LENGTH, _WIDTH)
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q, k, values(0.9, 2, _LENGTH, rotated), values(1.1, 2, _LENGTH, rotated)


def _call(function: Any, *tensors: Tensor, **named: int) -> tuple[Tensor, ...] | None:
    try:
        with torch.no_grad(), NoForeignKernels():
            result = function(*tensors, **named)
    except Exception:  # of a function that takes other tensors than these, anything may come
        return None
    pair = isinstance(result, tuple) and len(result) == 2
    return result if pair and all(isinstance(t, Tensor) for t in result) else None


def _agrees(
    function: Any, heads_dim: int, rotated: int, *, batched: bool = True, **named: int
) -> bool:
    """Whether it turns the example, or the first one of its batch, by halves."""
    q, k, cos, sin = _example(heads_dim, rotated)
    if not batched:
        q, k, cos, sin = (tensor[0] for tensor in (q, k, cos, sin))
    found = _call(function, q, k, cos, sin, **named)
    if found is None:
        return False
    heads_dim = heads_dim if batched else heads_dim - 1
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    for x, y in zip((q, k), found, strict=True):
        first, second = x[..., :rotated].chunk(2, -1)
        turned = x[..., :rotated] * cos + torch.cat((-second, first), -1) * sin
        wanted = torch.cat((turned, x[..., rotated:]), -1)
        if y.shape != wanted.shape or not torch.allclose(
            y.double(), wanted, rtol=0, atol=_TOLERANCE
        ):
            return False
    return True


def _keeps_dtype(function: Any, heads_dim: int) -> bool:
    q, k, cos, sin = _example(heads_dim, _WIDTH)
    found = _call(function, q.bfloat16(), k.bfloat16(), cos.float(), sin.float())
    return found is not None and found[0].dtype == torch.bfloat16
