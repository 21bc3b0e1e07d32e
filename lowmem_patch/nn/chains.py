"""Chains of elementwise functions whose values are never saved: autograd saves what enters the chain.

A module's forward runs under a torch function mode. Where it calls one of the planned functions, it gets a
deferred tensor, whose op holds the steps by which it is made of the chain's sources. In backward the steps
are run again with gradients, once for all who read the value and for the gradients of the sources.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.formulas import FORWARD
from lowmem_patch.functional import (
    ActivationKind,
    ExpertWeight,
    RecomputedMatmul,
    in_compiler,
    is_transformed,
    recomputed_linear,
    without_torch_function,
)
from lowmem_patch.nn.chain_steps import (
    Autocast,
    Described,
    Leaf,
    Step,
    Value,
    autocast_of,
    call_of,
    has_strides,
    laid_out,
    run,
    under,
    value_made,
)
from lowmem_patch.nn.channel_norms import NormedChannels
from lowmem_patch.nn.context import is_foreign, unfreed
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, Unstored, detached_of, value_of
from lowmem_patch.nn.deferred_experts import Product
from lowmem_patch.nn.deferred_ops import Activation
from lowmem_patch.nn.modes import ForwardMode, is_in_weighted_part
from lowmem_patch.nn.op import (
    Arguments,
    Function,
    Named,
    Op,
    Projection,
    waits_for_gradient,
)
from lowmem_patch.nn.watched import is_of_norm
from lowmem_patch.tracing.call_arguments import (
    MIRRORED,
    ElementwiseCall,
    as_plain,
    concatenation_call,
    elementwise_call,
    largest_shape,
)
from lowmem_patch.tracing.op_roles import Role, function_name, role_of

_excluded: Any = torch._C._SetExcludeDispatchKeyGuard
_KEY = torch._C.DispatchKey


_Call = tuple[Function, Arguments, Named]


class Caller:
    """One run of a forward. ``moved``: Linears read rearranged values, and to rearrange is one step more."""

    def __init__(self, moved: bool) -> None:
        self.moved = moved


MOVED = Role.RESHAPE | Role.UNIT_DIMENSION | Role.CONTIGUOUS | Role.PERMUTE | Role.TRANSPOSE


class Chain(Op):
    """The value of a chain's last step. All gradients pass through it, but for those of further steps.

    Args:
        last: the step.
        places: of the leaves, among the sources.
        like: the value's shape, strides and dtype.
        autocast: under which the steps run.
        caller: of the steps, which no other makes more of: residual streams would be added up anew in each
            block.
    """

    may_be_bypassed, outlives, reads = False, True, 1

    def __init__(
        self, last: Step, places: dict[Leaf, int], like: Value, autocast: Autocast, caller: Caller
    ) -> None:
        self.last, self.places, self.like, self.autocast = last, places, like, autocast
        self.caller = caller
        self._graph: tuple[list[Tensor], Tensor] | None = None  # of one backward

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.like.dtype

    def shape(self, sources: tuple[Tensor, ...]) -> torch.Size:
        return self.like.shape

    def strides(self, sources: tuple[Tensor, ...]) -> tuple[int, ...] | None:
        return self.like.strides

    def in_backward(self, h: Unstored) -> Tensor:
        # a convolution's, which the sources' own gradients follow; it reads below autograd
        with _excluded(_KEY.AutogradFunctionality, False), _excluded(_KEY.ADInplaceOrView, False):
            return self.again(*h.sources)

    def compute(self, *sources: Tensor) -> Tensor:
        with under(self.autocast):
            return run(self.last, {leaf: sources[i] for leaf, i in self.places.items()})

    def was_computed(self, sources: tuple[Tensor, ...]) -> None:
        for source in sources:
            if isinstance(source, Unstored):  # whose other readers mostly come before
                source.let_go()

    def again(self, *sources: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The value, in a reader's backward; the sources' own gradients need the steps after it."""
        if self._graph is None:
            self._graph = self._with_graph(sources)
            # the sources' gradients may not be asked for
            torch.autograd.Variable._execution_engine.queue_callback(self._let_go)
        value = self._graph[1].detach()
        return value if dtype is None else value.to(dtype)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        leaves, value = self._graph or self._with_graph(sources)
        self._let_go()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not wanted:  # all were frozen since
            return (None,) * len(leaves)
        found = iter(torch.autograd.grad(value, wanted, dy, allow_unused=True))
        return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)

    def _with_graph(self, sources: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        leaves = [detached_of(one).requires_grad_(one.requires_grad) for one in sources]
        self.was_computed(sources)
        with torch.enable_grad():
            return leaves, self.compute(*leaves)

    def _let_go(self) -> None:
        self._graph = None

    def rearranged(self, h: Deferred, func: Function, args: Arguments, kwargs: Named) -> Any:
        rest = tuple(map(as_plain, args[1:]))
        kwargs = {name: as_plain(item) for name, item in kwargs.items()}
        moves = self.caller.moved and role_of(function_name(func)).has(MOVED)
        given = (*rest, *kwargs.values())
        if not moves or any(isinstance(item, (Tensor, torch.dtype)) for item in given):
            return None
        # past h, of which nobody may wait for the gradient
        if not (h.numel() and _is_chain(h, self.caller)):
            return None
        made = laid_out(func, Described.of((h, *rest), kwargs))
        if made is None or (func is Tensor.contiguous and h.is_contiguous()):
            return None
        like = Value(*made, self.like.dtype)
        h.was_bypassed = self.may_be_bypassed = True
        step = Step(func, (self.last, *rest), kwargs)
        op = Chain(step, self.places, like, self.autocast, self.caller)
        op.past = _past(h)
        return defer(op, h.sources)

    def times(self, h: Deferred, other: Any) -> Any:
        whole = isinstance(other, (int, float)) or (
            isinstance(other, Tensor) and other.shape == h.shape and other.is_floating_point()
        )
        if not whole:
            return NotImplemented
        pair = (h, other)
        chained = {id(one) for one in pair if _is_chain(one, self.caller)}
        made = extended(torch.mul, pair, {}, self.caller, chained)
        return NotImplemented if made is None else made

    def activated(self, h: Any, kind: ActivationKind, reads: int, in_place: bool) -> Any:
        if not _is_chain(h, self.caller):
            return NotImplemented
        made = extended(FORWARD[kind], (h,), {}, self.caller, {id(h)})
        return NotImplemented if made is None else made

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        weight, bias, adapter = to[:3]
        trains = weight.requires_grad or (adapter is not None and adapter.lora_A.requires_grad)
        if not trains:
            return super().linear(h, to, dtype)
        given = (self.again, h.sources, weight, bias, dtype, adapter)
        if in_compiler() or not isinstance(h, Unstored):
            return recomputed_linear(h.plain(), *given)
        return recomputed_linear(h, *given, value=h.read())

    def recipe(self, h: Deferred) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return self.again, h.sources

    def grouped(
        self, h: Deferred, func: Callable[..., Any], weight: ExpertWeight, offsets: Tensor | None
    ) -> Any:
        # itself, which lets its values go: autograd may hold the product, which holds what made it
        return Product.of(RecomputedMatmul(func, self.again, h, weight, offsets, h.sources))


def _is_chain(tensor: Any, caller: Caller) -> bool:
    """Whether a further step may be made of it, past which no gradient comes to the tensor itself."""
    if not isinstance(tensor, Unstored) or type(tensor.op) is not Chain:
        return False
    if tensor.op.caller is not caller:
        return False
    return not (waits_for_gradient(tensor) or tensor.is_changed())


def _may_wait(tensors: list[Tensor], chained: Set[int]) -> bool:
    """Whether a gradient is asked for, and by autograd alone, and no tensor has a class of its own."""
    if any(is_foreign(tensor) and not isinstance(tensor, Deferred) for tensor in tensors):
        return False
    if is_transformed():
        return False
    # a step of a mask alone has no gradient
    asks = chained or any(tensor.requires_grad for tensor in tensors)
    return bool(asks) and torch.is_grad_enabled()


def _operands(args: Arguments, kwargs: Named, chained: Set[int]) -> list[Tensor]:
    """The tensors of a call, first one of the largest shape; none where one may not enter a chain."""
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    if not _may_wait(tensors, chained):
        return []
    shape = largest_shape(tensors)
    whole = [tensor for tensor in tensors if tensor.shape == shape]
    if not whole:
        return []
    first = max(whole, key=lambda tensor: id(tensor) in chained)
    if any(tensor.device != first.device and tensor.dim() for tensor in tensors):
        return []
    return [first, *(tensor for tensor in tensors if tensor is not first)]


def extended(
    func: Function, args: Arguments, kwargs: Named, caller: Caller, chained: Set[int]
) -> Deferred | None:
    """``func(*args, **kwargs)``, deferred; None where it cannot wait.

    Args:
        caller: as of a `Chain`.
        chained: ids of the tensors of its chains.
    """
    return _extended((func, args, kwargs), Described.of(args, kwargs), caller, chained)


def _extended(
    call: _Call, described: Described, caller: Caller, chained: Set[int]
) -> Deferred | None:
    """As `extended`; ``described``: the arguments of the call."""
    func, args, kwargs = call
    tensors: list[Any] = _operands(args, kwargs, chained)
    if not tensors:
        return None
    device = tensors[0].device
    like = value_made(func, described, device, autocast_of(device.type))
    return None if like is None else _made(call, tensors, like, caller, chained)


def concatenated(
    args: Arguments, kwargs: Named, caller: Caller, chained: Set[int]
) -> Deferred | None:
    """`torch.cat` of contiguous tensors, deferred; None where it cannot wait. A part may be an activation
    that waits. Further arguments as of `extended`."""
    call = concatenation_call(args, kwargs)
    if call is None or not _may_wait(list(call.parts), chained):
        return None
    if not all(part.is_contiguous() for part in call.parts):  # images whose channels lie last
        return None
    joining = (_concatenate, call.parts, {"dim": call.dim})
    like = Value(call.shape, None, call.parts[0].dtype)
    return _made(joining, list(call.parts), like, caller, chained)


def _concatenate(*parts: Tensor, dim: int) -> Tensor:
    return torch.cat(parts, dim)


def _made(
    call: _Call, tensors: list[Any], like: Value, caller: Caller, chained: Set[int]
) -> Deferred | None:
    """What a function makes of ``tensors``, which are among its arguments."""
    func, args, kwargs = call
    autocast = autocast_of(tensors[0].device.type)
    if any(id(tensor) in chained and tensor.op.autocast != autocast for tensor in tensors):
        return None
    sources, places, items = _joined(tensors, chained)

    def item(given: Any) -> Any:
        return items[id(given)] if isinstance(given, Tensor) else given

    step = Step(func, tuple(map(item, args)), {name: item(one) for name, one in kwargs.items()})
    if like.dtype == torch.bool or not any(tensor.requires_grad for tensor in tensors):
        sources = [source.detach() for source in sources]  # to which a mask has no gradient
    op = Chain(step, places, like, autocast, caller)
    op.past = _past(*(tensor for tensor in tensors if id(tensor) in chained))
    return defer(op, tuple(sources))


def _past(*before: Deferred) -> tuple[weakref.ref[Any], ...]:
    """As of an `Op` that makes one more step of these."""
    found = (one for h in before for one in (weakref.ref(h), *h.op.past))
    return tuple({id(one): one for one in found}.values())


def _joined(
    tensors: list[Any], chained: Set[int]
) -> tuple[list[Tensor], dict[Leaf, int], dict[int, Step | Leaf]]:
    """The sources of operands, the places of leaves among them, and what stands for each operand."""
    sources: list[Tensor] = []
    places: dict[Leaf, int] = {}
    items: dict[int, Step | Leaf] = {}
    for tensor in tensors:
        if id(tensor) in chained:
            for leaf, place in tensor.op.places.items():
                source = tensor.sources[place]
                if leaf not in places or source.requires_grad:  # those of a mask ask for none
                    places[leaf] = _place_in(sources, source)
            items[id(tensor)] = tensor.op.last
            tensor.op.may_be_bypassed = tensor.was_bypassed = True
        elif id(tensor) not in items:
            items[id(tensor)] = leaf = Leaf()
            places[leaf] = _place_in(sources, saved_for(tensor))
    return sources, places, items


def saved_for(tensor: Tensor) -> Tensor:
    """What is saved of an operand: of an activation, or a norm that waits, nothing: it is computed again."""
    known = isinstance(tensor, Deferred) and type(tensor.op) in (Activation, NormedChannels)
    if not isinstance(tensor, Deferred) or not known or tensor.is_changed():
        return unfreed(value_of(tensor))
    if isinstance(tensor, Unstored):
        return tensor
    if waits_for_gradient(tensor):
        return tensor.plain()
    tensor.was_bypassed = True
    return defer(tensor.op, tensor.sources)


def _place_in(sources: list[Tensor], tensor: Tensor) -> int:
    """The place of a tensor among the sources, to which it is added where it is none."""
    for place, source in enumerate(sources):
        if source is tensor:
            return place
    sources.append(tensor)
    return len(sources) - 1


class DeferChains(ForwardMode):
    """Gives deferred tensors where the module's forward calls these functions."""

    def __init__(self, module: nn.Module, calls: frozenset[ElementwiseCall], moved: bool) -> None:
        super().__init__(module)
        self.calls, self.caller = calls, Caller(moved)
        names = frozenset(call.name for call in calls)
        self.names = names | {name for name, other in MIRRORED.items() if other in names}

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.packs_alike() or is_in_weighted_part(self.module):
            return NotImplemented
        with without_torch_function():  # which each attribute of a deferred tensor is
            made = self._deferred(func, args, kwargs)
        return NotImplemented if made is None else made

    def _deferred(self, func: Function, args: Arguments, kwargs: Named) -> Deferred | None:
        given = (*args, *kwargs.values()) if kwargs else args
        if not all(map(has_strides, given)):  # sparse or nested: none was planned
            return None
        name, chained = func.__name__, set[int]()

        def maker(tensor: Tensor) -> str | None:
            if _is_chain(tensor, self.caller):
                chained.add(id(tensor))
                return "chain"
            return "norm" if is_of_norm(tensor) else None

        if role_of(name).has(Role.CONCATENATION):
            planned = elementwise_call(name, args, kwargs, maker) in self.calls
            return concatenated(args, kwargs, self.caller, chained) if planned else None
        described = Described.of(args, kwargs, maker)
        try:
            planned = call_of(name, described) in self.calls
        except TypeError:  # an argument that has no hash, as no planned call's
            return None
        return _extended((func, args, kwargs), described, self.caller, chained) if planned else None
