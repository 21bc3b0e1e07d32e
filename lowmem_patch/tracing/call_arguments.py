"""What the arguments of a call of a torch function ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.tracing.op_roles import Role, role_of


def argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any
) -> Any:
    """An argument that may be given by position or by name."""
    return kwargs[name] if name in kwargs else (args[index] if len(args) > index else default)


def by_place(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function whose first one torch calls input or tensor, with that one by its place."""
    for name in () if args else ("input", "tensor"):
        if name in kwargs:
            rest = {key: item for key, item in kwargs.items() if key != name}
            return (kwargs[name],), rest
    return args, kwargs


class AttentionCall(NamedTuple):
    """The first arguments of ``F.scaled_dot_product_attention``; other functions of attention have some of
    them."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False


def attention_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """Read the arguments of a function of attention, given by position or by name."""
    fields = AttentionCall._fields
    # in the others, behind the first three stand other arguments
    by_place = fields if name == "scaled_dot_product_attention" else fields[:3]
    by_name = {field: kwargs[field] for field in fields if field in kwargs}
    return AttentionCall(**dict(zip(by_place, args, strict=False)), **by_name)


class DropoutCall(NamedTuple):
    """``p`` is 0 where the call does nothing: outside training, or for a probability of 0."""

    p: float
    in_place: bool


def dropout_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DropoutCall:
    """Read the arguments of ``F.dropout`` or ``torch.dropout``, which name ``training`` differently."""
    p = argument(args, kwargs, 1, "p", 0.5)
    training = argument(args, kwargs, 2, "training", kwargs.get("train", True))
    in_place = argument(args, kwargs, 3, "inplace", False)
    return DropoutCall(float(p) if training else 0.0, bool(in_place))


_CALLED_WITH_WEIGHT = Role.LINEAR | Role.GROUPED_MATMUL


class WeightMatmul(NamedTuple):
    """``input @ weight + bias``; ``transposed``: the weight is stored ``[in, out]`` (GPT-2's Conv1D)."""

    input: Any
    weight: Any
    bias: Any = None
    transposed: bool = False


def weight_matmul(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WeightMatmul | None:
    """The operands of a call of the functions that a Linear, a Conv1D or experts call, of ``x @ weight`` with
    a matrix for the weight, or of a batched matmul, whose weight may be anything; or None."""
    args, kwargs = by_place(args, kwargs)
    if name == "addmm":
        return WeightMatmul(args[1], args[2], args[0], True) if len(args) == 3 else None
    if role_of(name).has(Role.MATMUL):
        fits = is_matrix_product(args, kwargs)
        return WeightMatmul(args[0], args[1], transposed=True) if fits else None
    if role_of(name).has(Role.BATCHED_MATMUL):
        return WeightMatmul(*args, transposed=True) if len(args) == 2 and not kwargs else None
    if not role_of(name).has(_CALLED_WITH_WEIGHT) or not args:
        return None
    weight = argument(args, kwargs, 1, "weight", None)
    return WeightMatmul(args[0], weight, argument(args, kwargs, 2, "bias", None))


def is_matrix_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a matmul multiplies rows with one matrix, as a Linear does."""
    if len(args) != 2 or kwargs or not all(isinstance(item, Tensor) for item in args):
        return False
    return bool(args[0].dim() > 1 and args[1].dim() == 2)


class GatherCall(NamedTuple):
    """``tensor.gather(dim, places)``."""

    tensor: Tensor
    dim: int
    places: Tensor


def gather_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatherCall | None:
    """The call of torch.gather with these arguments; None where it has others, or a dimension has a name."""
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    if given.keys() != {"input", "dim", "index"} or len(args) + len(kwargs) != 3:
        return None
    found = GatherCall(given["input"], given["dim"], given["index"])
    tensors = isinstance(found.tensor, Tensor) and isinstance(found.places, Tensor)
    return found if tensors and isinstance(found.dim, int) else None


def are_row_numbers(index: Any) -> bool:
    """Whether ``tensor[index]`` gathers rows of a tensor."""
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype in _INTEGERS


_INTEGERS = (torch.int64, torch.int32)


def is_square(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a power of a tensor is its square. An exponent that is a tensor may train."""
    if kwargs or len(args) != (1 if name == "square" else 2):
        return False
    return name == "square" or (isinstance(args[1], (int, float)) and args[1] == 2)


_PLAIN = (int, float, str, type(None))


class CalledFunction(NamedTuple):
    """A torch function of one tensor, with what else it is called with: ``gelu(approximate='tanh')``."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        named = (f"{name}={value!r}" for name, value in self.kwargs if value is not None)
        given = [*map(repr, self.args), *named]
        return f"{self.name}({', '.join(given)})"


def called_function(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, CalledFunction] | None:
    """The tensor and the function of a call; None where other tensors or objects are given as well."""
    tensor = argument(args, kwargs, 0, "input", None)
    rest = tuple(map(as_plain, args[1:]))
    named = {key: as_plain(item) for key, item in kwargs.items() if key != "input"}
    if named.get("inplace") is False:  # torch names it where the caller does not
        del named["inplace"]
    plain = all(map(_is_plain, (*rest, *named.values())))
    if not isinstance(tensor, Tensor) or not plain:
        return None
    return tensor, CalledFunction(name, rest, tuple(sorted(named.items())))


def as_plain(item: Any) -> Any:
    """An argument that stays as it is where its caller changes a list later: a tuple in the place of that."""
    return tuple(item) if isinstance(item, (list, tuple)) else item  # also a torch.Size


def _is_plain(item: Any) -> bool:
    return all(map(_is_plain, item)) if isinstance(item, tuple) else isinstance(item, _PLAIN)


_TINY = 1e-10  # a larger eps is meant to be seen: torch takes the larger one of it and the length


def normalized_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, float] | None:
    """The tensor and eps of a call of ``F.normalize`` over the last dimension by the Euclidean norm, whose
    eps is so small that it only keeps from dividing by 0."""
    x, p, eps = (
        argument(args, kwargs, place, name, default)
        for place, name, default in ((0, "input", None), (1, "p", 2.0), (3, "eps", 1e-12))
    )
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or not x.shape[-1]:
        return None
    last = argument(args, kwargs, 2, "dim", 1) in (-1, x.dim() - 1)
    tiny = isinstance(eps, float) and 0 < eps <= _TINY
    return (x, eps) if last and tiny and p == 2 and kwargs.get("out") is None else None


class ElementwiseCall(NamedTuple):
    """A call of an elementwise function by the kinds of its arguments: ``clamp(whole, min=number)``.

    A tensor is named by who made it (``chain``, ``norm``); or it is of the result's shape (``whole``), or has
    one number for each row of it (``column``), or is smaller otherwise (``part``).
    """

    name: str
    args: tuple[str, ...]
    kwargs: tuple[tuple[str, str], ...]


# Python asks the right operand first where its class is derived from the left one's, as Deferred is
MIRRORED = {"gt": "lt", "ge": "le"}


def elementwise_call(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    maker: Callable[[Tensor], str | None],
) -> ElementwiseCall | None:
    """The call as others are compared with it; None where something else than tensors, numbers, dtypes and
    words is given.

    Args:
        maker: what made a tensor: such a call (``chain``), or a norm (``norm``); None for all else.
    """
    if role_of(name).has(Role.CONCATENATION):
        return _joining_call(name, concatenation_call(args, kwargs), maker)
    given = (*args, *kwargs.values())
    tensors = [item for item in given if isinstance(item, Tensor)]
    if not tensors or not all(isinstance(item, _ELEMENTWISE) for item in given):
        return None
    shape = largest_shape(tensors)
    if shape is None:
        return None

    def kind(item: Any) -> str:
        if isinstance(item, Tensor):
            return maker(item) or _size_of(item.shape, shape)
        return "number" if type(item) in (int, float) else repr(item)

    if name in MIRRORED and len(args) == 2:
        name, args = MIRRORED[name], args[::-1]
    named = sorted((key, kind(item)) for key, item in kwargs.items())
    return ElementwiseCall(name, tuple(map(kind, args)), tuple(named))


def _size_of(shape: torch.Size, largest: torch.Size) -> str:
    if shape == largest:
        return "whole"
    return "column" if shape and shape[-1] == 1 < largest[-1] else "part"


def _joining_call(
    name: str, joined: ConcatenationCall | None, maker: Callable[[Tensor], str | None]
) -> ElementwiseCall | None:
    if joined is None:
        return None
    kinds = (maker(part) or "part" for part in joined.parts)
    return ElementwiseCall(name, (*kinds, f"dim {joined.dim}"), ())


class ConcatenationCall(NamedTuple):
    """A call of `torch.cat`: of tensors of one dtype that fit, none of them empty; ``dim`` is at least 0."""

    parts: tuple[Tensor, ...]
    dim: int

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0].shape
        length = sum(part.shape[self.dim] for part in self.parts)
        return torch.Size((*first[: self.dim], length, *first[self.dim + 1 :]))


def concatenation_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ConcatenationCall | None:
    """How `torch.cat` is called; None where torch converts what it is given, or refuses it."""
    given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    parts, dim = given.pop("tensors", ()), given.pop("dim", 0)
    if given or len(args) > 2 or not isinstance(parts, (list, tuple)) or type(dim) is not int:
        return None
    if len(parts) < 2 or not all(isinstance(part, Tensor) and part.numel() for part in parts):
        return None
    first = parts[0]
    if not -first.dim() <= dim < first.dim():
        return None
    dim %= first.dim()
    fits = {(part.dtype, part.device, part.shape[:dim], part.shape[dim + 1 :]) for part in parts}
    return ConcatenationCall(tuple(parts), dim) if len(fits) == 1 else None


def largest_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """The shape of what an elementwise function makes of them; None where it would make nothing: a cast to
    the dtype of a tensor reads no values of it, so that it may have any shape."""
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) == 1:
        return shapes.pop()
    largest = max(shapes, key=lambda shape: (len(shape), shape.numel()))
    # torch.broadcast_shapes takes 30 us and more
    if all(_spreads_to(shape, largest) for shape in shapes):
        return largest
    padded = [(1,) * (len(largest) - len(shape)) + tuple(shape) for shape in shapes]
    found = [max(lengths) if 0 not in lengths else 0 for lengths in zip(*padded, strict=True)]
    fits = all(
        length in (1, whole) for shape in padded for length, whole in zip(shape, found, strict=True)
    )
    return torch.Size(found) if fits else None


def _spreads_to(shape: torch.Size, largest: torch.Size) -> bool:
    """Whether broadcasting makes the larger shape of this one, which has no more dimensions."""
    place = len(largest) - len(shape)
    for length in shape:
        if length not in (1, largest[place]):
            return False
        place += 1
    return True


_ELEMENTWISE = (Tensor, int, float, str, torch.dtype, type(None))


def moved_channel(
    name: str, tensor: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """Where ``permute`` moves the last dimension of a tensor, all others in their order; None of any other
    call."""
    if not role_of(name).has(Role.PERMUTE) or kwargs:
        return None
    given = rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest
    order = [dim % tensor.dim() for dim in given]
    last = tensor.dim() - 1
    others = [dim for dim in order if dim != last]
    return order.index(last) if others == sorted(others) else None


def zeroed_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The mask ``[.., 1]`` of rows ``[.., D]`` that a function overwrites with zeros."""
    if not role_of(name).has(Role.FILL) or len(args) != 3 or kwargs:
        return None
    rows, mask, number = args
    of_rows = isinstance(mask, Tensor) and mask.shape == (*rows.shape[:-1], 1)
    return mask if of_rows and isinstance(number, (int, float)) and number == 0 else None


class ChannelNormCall(NamedTuple):
    """A call of ``batch_norm``, ``group_norm`` or ``instance_norm`` of `torch.nn.functional` that computes
    the statistics of its input.

    Attributes:
        name: of the function.
        groups: of channels, of each sample: all of them in InstanceNorm; 0: BatchNorm.
    """

    name: str
    x: Tensor
    groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    momentum: float = 0.1


_IN_EACH_SAMPLE = ("input", "num_groups", "weight", "bias", "eps")
_IN_THE_BATCH = (
    "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
)  # fmt: skip


def channel_norm_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ChannelNormCall | None:
    """How a function of this name is called, if it is such a norm."""
    if not role_of(name).has(Role.CHANNEL_NORM):
        return None
    names = _IN_EACH_SAMPLE if name == "group_norm" else _IN_THE_BATCH
    given = dict(zip(names, args, strict=False)) | kwargs
    if name == "instance_norm" and "use_input_stats" in given:
        given["training"] = given.pop("use_input_stats")
    x = given.get("input")
    # torch.batch_norm has more arguments
    known = len(args) <= len(names) and given.keys() <= set(names)
    if not known or not isinstance(x, Tensor) or x.dim() < 2:
        return None
    groups = _groups_of(name, given)
    if groups is None:
        return None
    rest = {key: given[key] for key in ("running_mean", "running_var", "momentum") if key in given}
    eps = given.get("eps", 1e-5)
    return ChannelNormCall(name, x, groups, given.get("weight"), given.get("bias"), eps, **rest)


def _groups_of(name: str, given: dict[str, Any]) -> int | None:
    if name == "group_norm":
        groups = given.get("num_groups")
        return groups if type(groups) is int and groups > 0 else None
    if name == "batch_norm":
        return 0 if given.get("training") is True else None
    own = given.get("training", True) is True and given.get("running_mean") is None
    return int(given["input"].shape[1]) if own else None
