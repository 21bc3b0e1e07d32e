"""The readers that know deferred tensors: what each saves in the place of the values.

Each gets (func, args, kwargs) of a torch function, and returns NotImplemented where the function itself
shall run, on the values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import in_compiler
from lowmem_patch.nn.context import is_foreign, product_dtype, to_save
from lowmem_patch.nn.deferred import READERS, Deferred, Unstored, value_of
from lowmem_patch.nn.deferred_casts import Cast
from lowmem_patch.nn.deferred_convolutions import read_convolution
from lowmem_patch.nn.deferred_experts import (
    AdaptedWeight,
    adapted_linear,
    read_batched,
    read_grouped,
)
from lowmem_patch.nn.op import Arguments, Function, Named, Op, Projection
from lowmem_patch.nn.traced import join
from lowmem_patch.tracing.call_arguments import (
    are_row_numbers,
    dropout_call,
    is_matrix_product,
    is_square,
    zeroed_rows,
)
from lowmem_patch.tracing.op_roles import Role, function_name, names_with, role_of
from lowmem_patch.tracing.row_moves import moves_rows

_PASSED_ON = (
    "lowmem_patch: a Linear or a view has read this deferred tensor, and its gradient goes past it: call "
    "{name} before the tensor is read"
)


def _project(h: Deferred, weight: Any, bias: Any) -> Any:
    if not torch.is_grad_enabled() or is_foreign(weight) or h.is_changed():
        return NotImplemented
    dtype = product_dtype(h.dtype, weight)
    if dtype is None:
        return NotImplemented  # torch's own error for mixed dtypes
    return h.op.linear(h, Projection(to_save(weight, dtype), bias), dtype)


def _read_linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 3 and isinstance(args[0], Deferred) and not isinstance(args[1], Deferred):
        return _project(*args)
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    h, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(weight, Deferred):
        return adapted_linear(h, weight, bias)
    return _project(h, weight, bias) if isinstance(h, Deferred) else NotImplemented


def _read_addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GPT-2's Conv1D: a Linear whose weight lies transposed."""
    if len(args) != 3 or kwargs or not isinstance(args[1], Deferred):
        return NotImplemented
    bias, h, weight = args
    if is_foreign(bias) or is_foreign(weight) or bias.dim() != 1:
        return NotImplemented
    return _project(h, weight.t(), bias)


def _read_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, in_place = dropout_call(args, kwargs)
    h = args[0]
    if not isinstance(h, Deferred):
        return NotImplemented
    if p == 0:
        return h
    waits = 0 < p < 1 and not in_place and h.numel() and not in_compiler()
    return h.op.dropped(h, p) if waits and _reads(h) else NotImplemented


def _reader_of_two(name: str) -> Callable[..., Any]:
    """Of a function of two operands, by the op's method of this name, which gets the deferred one first."""

    def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 2 or kwargs:
            return NotImplemented
        h, other = args if isinstance(args[0], Deferred) else args[::-1]
        # a residual reads a norm's output at each layer
        if getattr(type(h.op), name) is getattr(Op, name) or not _reads(h):
            return NotImplemented
        return getattr(h.op, name)(h, other)

    return read


def _read_sum_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or in_compiler() or not _reads(args[0]):
        return NotImplemented
    return args[0].op.added(*args)


def _read_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = zeroed_rows(func.__name__, args, kwargs)
    if mask is None or is_foreign(mask) or in_compiler() or not _reads(args[0]):
        return NotImplemented
    return args[0].op.zeroed(args[0], mask, func is Tensor.masked_fill_)


def _read_matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    if isinstance(args[1], Deferred) and args[1].dim() == 2 and isinstance(args[0], Tensor):
        return adapted_linear(args[0], args[1], None, transposed=True)
    if not _reads(args[0]):
        return NotImplemented
    if is_matrix_product(args, kwargs):
        return NotImplemented if is_foreign(args[1]) else _project(args[0], args[1].t(), None)
    return args[0].op.matmul(*args)


def _read_power(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_square(func.__name__, args, kwargs) or not _reads(args[0]):
        return NotImplemented
    # autocast computes a power in float32 on a GPU, and leaves a square as it is
    if func.__name__ != "square" and torch.is_autocast_enabled(args[0].device.type):
        return NotImplemented
    return args[0].op.squared(args[0])


def _read_cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    h = args[0]
    given = [*args[1:], *kwargs.values()]
    dtype = torch.float32 if func is Tensor.float else given[0] if len(given) == 1 else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or not _reads(h):
        return NotImplemented
    if torch.float64 in (dtype, h.dtype):
        return NotImplemented  # neither autocast nor an adapter casts those
    if dtype == h.dtype:
        return h
    found = h.op.cast(h, dtype)
    return Cast(dtype, h._adapts).of(h) if found is NotImplemented else found


def _read_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    h = args[0]
    if not _reads(h):
        return NotImplemented
    if (known := h.op.rearranged(h, func, args, kwargs)) is not None:
        return join(known, h, func, args, kwargs)
    given, rest = func, args[1:]
    if func is Tensor.__getitem__ and are_row_numbers(rest[0]):
        return h.op.gathered(h, rest[0])
    if func is Tensor.view and rest and isinstance(rest[0], torch.dtype):
        return NotImplemented  # another reading of the same bits
    if func is Tensor.view:
        func = Tensor.reshape  # a source may be strided where the value is contiguous
    return _moved(h, given, func, rest, kwargs)


def _moved(h: Deferred, given: Function, func: Function, rest: Arguments, kwargs: Named) -> Any:
    """``given(h, *rest)``, which ``func`` does to what h is computed from."""
    like: Any = h
    while isinstance(like, Unstored) and not like.held:  # what it is computed from
        like = like.sources[0]
    if type(h.op).moved is Op.moved:
        contiguous = role_of(function_name(given)).has(Role.CONTIGUOUS) and h.is_contiguous()
        return h if contiguous and not (rest or kwargs) else NotImplemented
    whole, like = like, _compiled_plain(like)
    output = func(like, *rest, **kwargs)
    if output is like:
        return h
    moves = isinstance(output, Tensor) and moves_rows(func, (like, *rest), kwargs, like, output)
    if not moves and not _views(h, func, rest, kwargs):
        return NotImplemented

    def move(tensor: Tensor) -> Any:
        return output if tensor is whole else func(_compiled_plain(tensor), *rest, **kwargs)

    return join(h.op.moved(h, move), h, given, (h, *rest), kwargs)


def _views(h: Deferred, func: Function, rest: Arguments, kwargs: Named) -> bool:
    """Whether a function gives all that an elementwise op is computed from rows of another length (the heads
    of an attention become one), and copies none of it."""
    if in_compiler() or not h.op.elementwise or not role_of(function_name(func)).has(Role.RESHAPE):
        return False
    stored = not any(isinstance(source, Unstored) for source in h.sources)
    return stored and all(
        func(source, *rest, **kwargs).untyped_storage()._cdata == source.untyped_storage()._cdata
        for source in h.sources
    )


def _compiled_plain(tensor: Tensor) -> Tensor:
    """Functions written in Python (pad) ask for a ``__torch_function__`` all the same there."""
    if in_compiler() and isinstance(tensor, Deferred):
        return tensor.plain()
    return tensor


def _reads(h: Any) -> bool:
    """Whether a known reader may save what ``h`` is computed from."""
    return isinstance(h, Deferred) and torch.is_grad_enabled() and not h.is_changed()


# FSDP and DeepSpeed begin a backward (FSDP gathers weights) when a gradient comes to any tensor that their
# module returned: one that goes past the logits has come to the loss, which they hold a hook of as well
_BEGINS_BACKWARD = ("torch.distributed.", "deepspeed.")


def _late_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    h, hook = args[0], args[-1]
    while isinstance(hook, partial):  # as FSDP1's
        hook = hook.func
    begins = str(getattr(hook, "__module__", "")).startswith(_BEGINS_BACKWARD)
    if isinstance(h, Deferred) and h.was_bypassed and h.op.may_be_bypassed and not begins:
        raise RuntimeError(_PASSED_ON.format(name=func.__name__))
    return NotImplemented


def _give_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreign kernel asks for the address: it may write there."""
    h = args[0]
    h._exposed = True
    return func(h.read(), *args[1:], **kwargs) if isinstance(h, Unstored) else NotImplemented


def _look_at_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    h = args[0]
    if not isinstance(h, Unstored):
        return NotImplemented
    h.held = True  # somebody may have a storage, whose address must stay
    value = h.read()
    if h.requires_grad and func in (Tensor.numpy, Tensor.__array__):  # which refuse a gradient
        value = value.detach().requires_grad_()
    return func(value, *args[1:], **kwargs)


def _get(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attributes: a write through ``.data`` leaves no trace, nor does a hook on the node."""
    h, attribute = args[0], func.__self__
    if attribute is _DATA:
        h.op.written_unseen(h)
        h._exposed = True
    elif attribute is Tensor.grad_fn:
        h._node_given = True
    elif attribute is Tensor.output_nr:  # which a gradient edge holds, and nobody else asks for
        if h.was_bypassed and h.op.may_be_bypassed:
            raise RuntimeError(_PASSED_ON.format(name="get_gradient_edge"))
    elif attribute is Tensor.grad:
        # of backward(inputs=[h]), which asks nobody. Where it left none, torch warns that this is no leaf
        if h.was_bypassed and h.op.may_be_bypassed and h.grad is not None:
            raise RuntimeError(_PASSED_ON.format(name="retain_grad"))
    elif attribute is Tensor.mT or (attribute is Tensor.T and h.dim() == 2):
        return _read_transposed(func, args, kwargs)
    return NotImplemented


def _read_transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.t()``, ``.T`` and ``.mT`` of an adapted weight; logits give a view of torch's own."""
    if in_compiler() or not isinstance(args[0].op, AdaptedWeight):
        return NotImplemented
    return _read_rows(Tensor.transpose, (args[0], -2, -1), {})


def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attributes: values that others are put in the place of, through ``.data``."""
    if func.__self__ is not _DATA:
        return NotImplemented
    h, value = args
    _get(func, args, kwargs)
    return func(h.read() if isinstance(h, Unstored) else h, value_of(value))


_DATA = Tensor.data

# not of a clone, which is asked for a memory of its own
_MOVES = (
    Role.RESHAPE | Role.UNIT_DIMENSION | Role.CONTIGUOUS | Role.PERMUTE | Role.TRANSPOSE | Role.ROLL
    | Role.PAD | Role.INDEX
)  # fmt: skip
_BY_ROLE: tuple[tuple[Role, Callable[..., Any]], ...] = (
    (Role.GROUPED_MATMUL, read_grouped),
    (Role.BATCHED_MATMUL, read_batched),
    (Role.CONVOLUTION, read_convolution),
    (Role.DROPOUT, _read_dropout),
    (Role.PRODUCT, _reader_of_two("times")),
    (Role.POWER, _read_power),
    (Role.SUM, _reader_of_two("plus")),
    (Role.SUM_IN_PLACE, _read_sum_in_place),
    (Role.FILL, _read_fill),
    (Role.MATMUL, _read_matmul),
    (Role.CAST, _read_cast),
    (_MOVES, _read_rows),
    (Role.HOOK, _late_hook),
    (Role.ADDRESS, _give_memory),
    (Role.MEMORY, _look_at_memory),
)
_TABLE = {name: reader for role, reader in _BY_ROLE for name in names_with(role)}
_TABLE |= {"__get__": _get, "__set__": _set, "linear": _read_linear, "addmm": _read_addmm}
_TABLE |= {"t": _read_transposed}
READERS.update(_TABLE)
