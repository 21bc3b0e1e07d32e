"""What autograd saves inside a module, in 8 bits; the forwards of such modules.

Autograd hands every tensor that it saves to a pack hook, and gets it back from an unpack hook in backward.
The hooks are set while a module runs that a strategy chose (`store_input`, `store_attention`); they store
what that module's matmul or attention reads in 8 bits (`lowmem_patch.functional.eight_bit`), and save all
else as it is. The forward computes with the values as they were.

Hooks take time of the host. Where nobody else packs what is saved, a norm and a plain Linear store 8 bits in
their own op (`lowmem_patch.functional.norms`, `lowmem_patch.functional.stored_linear`). So does a Linear
behind an activation (`lowmem_patch.functional.linear`), whose backward reads 8 bits.

A compiler knows no hooks of modules: there the Linears, norms and attention store in ops of its graph.

One memory is stored once, whoever saves it: a norm and the Linears behind it, q, k and v as parts of one
Linear's output, attention and the Linear behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from lowmem_patch.functional import (
    EIGHT_BIT_DTYPES,
    Memory,
    as_it_is,
    below_modes,
    in_compiler,
    is_eager,
    is_ordinary,
    may_pack,
    memory_in_eight_bits,
    packer,
    packs_saved_tensors,
    refuse_second_order,
    stored_linear,
    stores_directly,
    unwritten,
    without_grad,
    without_torch_function,
)
from lowmem_patch.nn.adapters import forward_as_one
from lowmem_patch.nn.context import (
    autocast_dtype,
    is_foreign,
    own_tensor,
    product_dtype,
    trains_here,
)
from lowmem_patch.nn.deferred import Deferred, Stored, Unstored, value_of
from lowmem_patch.nn.deferred_ops import saved_copy
from lowmem_patch.nn.gamma_checks import RATIO_IN_BITS, SHIFT_IN_BITS
from lowmem_patch.nn.gammas import check_gammas
from lowmem_patch.nn.modes import AttentionInGraph, ForwardMode, has_foreign_mode, under_mode
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import Own, give_forward_around, inner_forward, multiplies_as_linear
from lowmem_patch.nn.stored import project
from lowmem_patch.nn.watched import Watched
from lowmem_patch.tracing.op_roles import Role, names_with

_ORDINARY = (Tensor, nn.Parameter, Watched)  # without torch functions of their own


def store_input(module: nn.Module, *, once: bool = False) -> None:
    """Let a norm, a Linear or a LoRA layer save what has the shape of its input in 8 bits.

    ``once``: a forward reads the weight once.
    """
    if isinstance(module, MSNorm):
        module.in_eight_bits = True
        # z = (y - beta) / gamma has the error of the group's largest y, divided by its own gamma
        checks = module.gamma_checks
        checks.smallest_ratio, checks.largest_shift = RATIO_IN_BITS, SHIFT_IN_BITS
        check_gammas([module])
        give_forward_around(module, _stores_output)
    else:
        give_forward_around(module, _stores_input, once)


def store_attention(module: nn.Module) -> None:
    """Let fused attention that runs in a module save q, k, v and its output in 8 bits."""
    give_forward_around(module, _stores_attention)


def _stores_attention(module: nn.Module, given: Own | None, /, *args: Any, **kwargs: Any) -> Any:
    if not in_compiler():
        return under_mode(module, _AttentionInEightBits, (), given, *args, **kwargs)
    forward = inner_forward(module, given)
    if not trains_here():
        return forward(*args, **kwargs)
    with AttentionInGraph():
        return forward(*args, **kwargs)


def _stores_output(norm: MSNorm, given: Own | None, /, *args: Any, **kwargs: Any) -> Any:
    if is_eager() and not packs_saved_tensors():  # its op stores the output by itself
        return inner_forward(norm, given)(*args, **kwargs)
    return _stores_by_hooks(norm, given, *args, **kwargs)


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and multiplies_as_linear(module)


def _stores_input(
    module: nn.Module, once: bool, given: Own | None, /, *args: Any, **kwargs: Any
) -> Any:
    if in_compiler():
        y = _in_graph(module, given, args[0]) if len(args) == 1 and not kwargs else None
        return inner_forward(module, given)(*args, **kwargs) if y is None else y
    if given is None and _is_linear(module) and len(args) == 1 and not kwargs:
        x = args[0]
        y = below_modes(_directly, module, once, saved_copy(x) if type(x) is Stored else x)
        if y is not None:
            if type(x) is Stored:
                x.was_bypassed = True
            return y
    return _stores_by_hooks(module, given, *args, **kwargs)


def _stores_by_hooks(module: nn.Module, given: Own | None, /, *args: Any, **kwargs: Any) -> Any:
    forward = inner_forward(module, given)
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Deferred):
        found = below_modes(_read_input, x)
        return _under_hooks(module, found, forward, *args, **kwargs)
    with without_torch_function():
        found, op = _read_input(x), x.op
        if found is not None and not found[2] and _are_storable(x.sources):
            x.op = op.in_eight_bits()
    try:
        if x.op is not op and type(module) is nn.Linear and type(module.weight) is nn.Parameter:
            return forward(*args, **kwargs)  # one op, which stores the sources by itself
        return _under_hooks(module, found, forward, *args, **kwargs)
    finally:
        x.op = op


def _directly(linear: nn.Linear, once: bool, x: Any) -> Tensor | None:
    """The Linear as one op that stores its input; None where hooks have to."""
    weight, bias = own_tensor(linear, "weight"), own_tensor(linear, "bias")
    if type(x) not in _ORDINARY or weight is None or not _may_store():
        return None
    if has_foreign_mode() or not stores_directly(x, weight, bias):
        return None
    autocast = autocast_dtype(x.device.type, x.dtype)
    dtype = weight.dtype if autocast is None else autocast
    alike = x.dtype == dtype and (autocast is not None or bias is None or bias.dtype == dtype)
    # autocast casts a weight once for all who read it
    if not alike or (weight.dtype != dtype and not once):
        return None
    return stored_linear(x, weight, bias, dtype)


def _in_graph(module: nn.Module, given: Own | None, x: Tensor) -> Tensor | None:
    """A Linear or a LoRA layer as a compiler sees it, with its input stored; None where that is in full."""
    ours = isinstance(x, Deferred) or (isinstance(x, Tensor) and not is_foreign(x))
    if not (trains_here() and ours and x.dtype in EIGHT_BIT_DTYPES):
        return None
    if isinstance(given, partial) and given.func is forward_as_one:
        y: Tensor = forward_as_one(module, *given.args[1:], x, stored=True)
        return y
    own = module._parameters
    weight, bias = own.get("weight"), own.get("bias")
    # pruned, a bias is an attribute
    if not _is_linear(module) or given is not None or weight is None or "bias" not in own:
        return None
    dtype = None if is_foreign(weight) else product_dtype(x.dtype, weight)
    if dtype is None or not weight.requires_grad:
        return None
    stored: Tensor = value_of(project(x, Projection(weight, bias, stored=True), dtype))
    return stored


def _are_storable(sources: tuple[Tensor, ...]) -> bool:
    """Whether one op can store these in 8 bits."""
    return all(
        type(source) in _ORDINARY and _is_storable(source) and source.dtype == sources[0].dtype
        for source in sources
    )


def _under_hooks(
    module: nn.Module,
    found: tuple[int, int | None, bool] | None,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if found is None:
        return forward(*args, **kwargs)
    numel, key, changed = found

    def is_stored(tensor: Tensor) -> bool:
        if tensor.numel() != numel:
            return False
        own = _storage_key(tensor)
        return own == key or not any(_is_of(tensor, own, p) for p in _parameters(module))

    with _Storing(is_stored, shared=not changed):
        return forward(*args, **kwargs)


def _read_input(x: Any) -> tuple[int, int | None, bool] | None:
    """Elements, storage, and whether somebody wrote into it; None where it is not to be stored."""
    if not _may_store() or not _is_storable(x):
        return None
    return x.numel(), _storage_key(x), isinstance(x, Deferred) and x.is_changed()


def _parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    if module._modules:
        return module.parameters()
    return [one for one in module._parameters.values() if one is not None]  # in a tenth of the time


def _is_of(tensor: Tensor, key: int | None, parameter: nn.Parameter) -> bool:
    """Whether a tensor is a parameter, a view of it or its copy under autocast: it may have as many elements
    as the input."""
    if tensor.numel() == parameter.numel() and sorted(tensor.shape) == sorted(parameter.shape):
        return True
    return not is_foreign(parameter) and key == _storage_key(parameter)


def _storage_key(tensor: Tensor) -> int | None:
    if type(tensor) in _ORDINARY:
        return int(tensor.untyped_storage()._cdata)
    if isinstance(tensor, Unstored):
        return None
    with without_torch_function():
        return int(tensor.untyped_storage()._cdata)


class _AttentionInEightBits(ForwardMode):
    """Runs fused attention with hooks."""

    names = names_with(Role.FUSED_ATTENTION)

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (_may_store() and self.packs_alike()):
            return NotImplemented
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        q, k, v = (named.get(name) for name in ("query", "key", "value"))
        if q is None or k is None or v is None or not all(map(_is_storable, (q, k, v))):
            return NotImplemented
        output = q.numel() // max(q.shape[-1], 1) * v.shape[-1]
        sizes = {q.numel(), k.numel(), v.numel(), output}
        widths, dims = {q.shape[-1], v.shape[-1]}, q.dim()

        own = {_storage_key(one) for one in (q, k, v)}

        # autograd holds this as long as what was packed, so that it must not hold q, k or v
        def is_stored(tensor: Tensor) -> bool:
            shape = tensor.shape  # the log-sum-exp has one number a row
            fits = len(shape) == dims and shape[-1] in widths and tensor.numel() in sizes
            # a mask may have the shape of q: infinite numbers have no 8 bits
            return fits and (tensor.requires_grad or _storage_key(tensor) in own)

        with _Storing(is_stored, shared=True, packed=_packed_storages((q, k, v))):
            return self.onward(func, args, kwargs)


def _packed_storages(parts: Iterable[Tensor]) -> frozenset[int]:
    """The storages that these tensors cover together, as parts of one Linear's output do."""
    others = {(_storage_key(one), one.storage_offset(), one.shape): one for one in parts}
    covered: Counter[int | None] = Counter()
    for (key, *_), part in others.items():
        covered[key] += 0 if key is None else part.nbytes
    return frozenset(
        key
        for (key, *_), part in others.items()
        if key is not None and covered[key] == part.untyped_storage().nbytes()
    )


def _may_store() -> bool:
    """Whether autograd saves anything here, and lets us say how."""
    return torch.is_grad_enabled() and is_ordinary() and bool(may_pack())


def _is_storable(x: Any) -> TypeGuard[Tensor]:
    """Whether this is a tensor of ours that 8 bits may stand for."""
    known = type(x) in _ORDINARY or isinstance(x, Deferred)
    if not known and (not isinstance(x, Tensor) or is_foreign(x)):
        return False
    if x.dtype not in EIGHT_BIT_DTYPES or x.layout is not torch.strided or x.is_nested:
        return False
    return bool(x.numel())


class _Stored(NamedTuple):
    """The place of a tensor in a memory.

    Attributes:
        parts: integers and scales, as who packs what we save gave them.
    """

    memory: Memory
    parts: tuple[Any, Any]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


# the second is what somebody else who packs gave in the place of a tensor
_Saved = _Stored | partial[Tensor] | tuple[Tensor, int]


class _Storing(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what ``is_stored`` says is saved in 8 bits.

    Args:
        shared: a memory that others stored is taken from them.
        packed: storages that are stored whole though a tensor is a part of them.
    """

    def __init__(
        self,
        is_stored: Callable[[Tensor], bool],
        *,
        shared: bool,
        packed: frozenset[int] = frozenset(),
    ) -> None:
        outer = packer()

        def pack(tensor: Tensor) -> _Saved:
            if type(tensor) is nn.Parameter and outer is None:
                return tensor, tensor._version  # it is there anyway
            if type(tensor) in _ORDINARY:
                return pack_values(tensor)
            with without_torch_function():
                return pack_values(tensor.detached() if isinstance(tensor, Deferred) else tensor)

        def pack_values(tensor: Tensor) -> _Saved:
            if is_stored(tensor) and _is_storable(tensor):
                return _store(tensor, outer, packed, shared=shared)
            if outer is not None:
                return partial(outer[1], outer[0](tensor))
            return as_it_is(tensor)

        pack.__dict__["outer"] = outer  # for `checkpointed_block`
        super().__init__(pack, _read)


def _store(tensor: Tensor, outer: Any, packed: frozenset[int], *, shared: bool) -> _Stored:
    storage = tensor.untyped_storage()
    size, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    # beside a part may lie what nobody reads, of any size, in its groups
    part = tensor.numel() * tensor.element_size() != storage.nbytes()
    if part and storage._cdata not in packed:
        with without_grad():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        strides, offset = tensor.stride(), 0
    memory = Memory.of(tensor, outer) if shared else Memory(tensor.dtype, tensor._version, outer)
    if outer is None:
        parts = memory.parts(tensor)
    else:
        if memory.packed is None:
            integers, scales = memory_in_eight_bits(tensor)  # they hold nothing, and are held here
            memory.packed = (outer[0](integers), outer[0](scales))
        parts = memory.packed
    memory.saved()
    return _Stored(memory, parts, size, strides, offset)


def _read(saved: _Saved) -> Tensor:
    refuse_second_order("eight_bit_storage")
    if isinstance(saved, _Stored):
        memory = saved.memory
        values = memory.read(*saved.parts, None if memory.packer is None else memory.packer[1])
        return values.as_strided(saved.size, saved.strides, saved.offset)
    if isinstance(saved, partial):
        return saved()
    return unwritten(*saved, "a module with 8-bit storage saved as it is")
