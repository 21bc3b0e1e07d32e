"""What experts read and multiply with: gathered rows, weights with an adapter, products with a weight each.

PEFT adapts the parameters of experts by W + s L R. Its own forward makes a tensor as large as all experts for
each of them, which autograd saves. Here that is made where it is read, and is never saved: Linears and the
matmuls of experts multiply with W, L and R one after another.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import (
    ExpertWeight,
    LowRank,
    RecomputedMatmul,
    RowBias,
    in_compiler,
    recomputed_linear,
)
from lowmem_patch.nn.context import autocast_dtype, is_foreign, product_dtype
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, Unstored, value_of
from lowmem_patch.nn.deferred_casts import Cast
from lowmem_patch.nn.op import Arguments, Function, Named, Op, Projection, waits_for_gradient
from lowmem_patch.nn.stored import attach, keep, project
from lowmem_patch.tracing.op_roles import Role, function_name, role_of


def _gathered(
    tensor: Tensor, index: Tensor, *masks: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    rows = tensor[index].to(dtype or tensor.dtype)
    for mask in masks:
        rows.masked_fill_(mask, 0.0)
    return rows


class GatheredRows(Op):
    """``tensor[index]``: matmuls of trained weights save the tensor and the index, and gather again.

    The sources are both, and the masks of rows that were overwritten with zeros. A product to which it is
    added does so as well. All gradients pass through it.
    """

    may_be_bypassed = False

    @classmethod
    def of(cls, tensor: Tensor, index: Tensor) -> Deferred:
        return keep(tensor[index], cls(), (tensor, index))

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        if to.adapter is not None or not to.weight.requires_grad:
            return super().linear(h, to, dtype)
        return recomputed_linear(h.plain(), _gathered, h.sources, to.weight, to.bias, dtype)

    def grouped(
        self, h: Deferred, func: Callable[..., Any], weight: ExpertWeight, offsets: Tensor | None
    ) -> Any:
        if not weight.trains:
            return NotImplemented
        return Product.of(RecomputedMatmul(func, _gathered, h.plain(), weight, offsets, h.sources))

    def zeroed(self, h: Deferred, mask: Tensor, in_place: bool) -> Any:
        if not in_place:
            return NotImplemented
        h.masked_fill_(mask, 0.0)
        h.sources = (*h.sources, mask)
        return _written_by_op(h)


def _written_by_op(h: Deferred) -> Deferred:
    """``h``, whose op and sources say what its values are behind a write that its op has just made."""
    h._first_version, h._versions = h._version, [source._version for source in h.sources]
    if isinstance(h, Unstored) and h._value is not None:
        h._value_version = h._value._version
    return h


class Product(Op):
    """The product of such a matmul; where each row of it is multiplied with a number, it is not saved.

    The sources are what the product is made of, until it is multiplied. A bias of gathered rows that is added
    in place is the last three of them. Rows may be masked in between: those that an expert of another device
    computes.

    Args:
        matmul: that makes it; its tensors are the sources.
    """

    biased = False
    mask: Tensor | None = None  # of rows that were overwritten with zeros
    whole: Callable[[], Any] = staticmethod(lambda: None)  # the product before that

    def __init__(self, matmul: RecomputedMatmul) -> None:
        self.multiply, self.again, self.offsets = matmul.multiply, matmul.again, matmul.offsets
        self.adapted, self.scale = matmul.weight.left is not None, matmul.weight.scale

    @classmethod
    def of(cls, matmul: RecomputedMatmul) -> Deferred:
        weights = [tensor for tensor in matmul.weight[:3] if tensor is not None]
        sources = (matmul.x, *weights, *matmul.sources)
        if in_compiler():
            return keep(matmul.product(), cls(matmul), sources)
        return attach(matmul.product(), cls(matmul), sources, watched=True)

    def was_used(self, h: Any) -> None:
        # not by a routing weight: whoever saves the product, or a part of it, need not hold x as well
        h.sources, h._versions = (), None

    def added(self, h: Deferred, other: Any) -> Any:
        gathered = isinstance(other, Deferred) and isinstance(other.op, GatheredRows)
        if not gathered or other.is_changed() or not h.sources or self.biased:
            return NotImplemented
        if other.shape != h.shape or other.dtype != h.dtype:
            return NotImplemented
        rows = other.plain()
        h.add_(rows)
        self.biased = True
        h.sources = (*h.sources, rows, *other.sources)
        return _written_by_op(h)

    def zeroed(self, h: Deferred, mask: Tensor, in_place: bool) -> Any:
        if in_place or not h.sources or self.mask is not None:
            return NotImplemented
        op = copy.copy(self)
        op.mask, op.whole = mask, weakref.ref(h)
        return attach(h.plain().masked_fill(mask, 0.0), op, h.sources, watched=True)

    def times(self, h: Deferred, other: Any) -> Any:
        weighs = isinstance(other, Tensor) and other.requires_grad and other.is_floating_point()
        if not weighs or not h.sources or other.shape != (*h.shape[:-1], 1):
            return NotImplemented
        whole = self.whole()
        if whole is not None:  # the product before its rows were masked, which somebody still has
            if waits_for_gradient(whole):
                return NotImplemented
            whole.was_bypassed = True
        factors = value_of(other)
        if self.mask is not None:  # a row of zeros has no part in a gradient
            factors = factors.masked_fill(self.mask, 0.0)
        x, weight, *rest = h.sources
        left, right = (rest.pop(0), rest.pop(0)) if self.adapted else (None, None)
        bias = None
        if self.biased:
            *rest, rows, table, numbers = rest
            bias = RowBias(rows, table, numbers)
        self.was_used(h)  # the caller may hold the product for longer
        h.was_bypassed = True
        of_experts = ExpertWeight(weight, left, right, self.scale)
        matmul = RecomputedMatmul(
            self.multiply, self.again, x, of_experts, self.offsets, tuple(rest)
        )
        return matmul.weighted(h.detached(), factors, bias)


class AdaptedWeight(Op):
    """``W + scale * L @ R`` of the sources W ``[.., F, O]``, L ``[.., F, r]`` and R ``[.., r, O]``."""

    reads = 1

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def compute(self, *sources: Tensor) -> Tensor:
        weight, left, right = sources
        if not weight.is_contiguous():  # the value lies in memory as the weight does
            return self.compute(weight.mT.contiguous(), right.mT, left.mT).mT
        add = torch.addmm if weight.dim() == 2 else torch.baddbmm
        with torch.autocast(weight.device.type, enabled=False):  # as PEFT's own sum
            return add(weight, left, right, alpha=self.scale)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        _, left, right = sources
        return dy, (dy @ right.mT).mul_(self.scale), (left.mT @ dy).mul_(self.scale)

    def rearranged(self, h: Deferred, func: Function, args: Arguments, kwargs: Named) -> Any:
        """One expert's weight, or that of the other way round."""
        role, rest, dims = role_of(function_name(func)), args[1:], h.dim()
        if kwargs or h.is_changed():
            return None
        weight, left, right = h.sources
        if role.has(Role.TRANSPOSE) and {one % dims for one in rest} == {dims - 2, dims - 1}:
            return defer(self, (weight.mT, right.mT, left.mT))
        if role.has(Role.INDEX) and dims == 3 and _is_number(rest[0]):
            return defer(self, (weight[rest[0]], left[rest[0]], right[rest[0]]))
        return None


def _is_number(index: Any) -> bool:
    """Whether ``tensor[index]`` is one of its parts."""
    if isinstance(index, Tensor):
        return index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool
    return isinstance(index, int) and not isinstance(index, bool)


def read_grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {key: item for key, item in kwargs.items() if item is not None}
    if len(args) != 2 or set(given) != {"offs"}:
        return NotImplemented
    return _multiplied(func, *args, given["offs"])


def read_batched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    dtype = autocast_dtype(args[0].device.type, args[0].dtype)
    if dtype is not None and not dtype == args[0].dtype == args[1].dtype:
        return NotImplemented  # a product of casts
    return _multiplied(func, *args, None)


def _multiplied(func: Any, x: Any, weight: Any, offsets: Any) -> Any:
    """The product with weights of experts, by ``func``."""
    whole = ExpertWeight(weight) if not is_foreign(weight) else _adapted(weight)
    # a cast of an adapted weight is left to its class
    if whole is None or whole.weight.dtype != weight.dtype or whole.weight.dim() != 3:
        return NotImplemented
    if not torch.is_grad_enabled():
        return NotImplemented
    reads = isinstance(x, Deferred) and not x.is_changed()
    found = x.op.grouped(x, func, whole, offsets) if reads else NotImplemented
    if found is not NotImplemented or whole.left is None:
        return found
    x = value_of(x)
    if is_foreign(x):
        return NotImplemented
    return Product.of(RecomputedMatmul(func, _itself, x, whole, offsets, (x,)))


def _itself(x: Tensor) -> Tensor:
    return x


def adapted_linear(x: Any, weight: Deferred, bias: Any, *, transposed: bool = False) -> Any:
    """A Linear of such a weight and its adapter as one op; NotImplemented where it is left to torch.

    ``transposed``: the weight is ``[in, out]``.
    """
    adapted = _adapted(weight)
    if adapted is None or weight.dim() != 2 or not torch.is_grad_enabled():
        return NotImplemented
    x = value_of(x) if isinstance(x, Deferred) and x.is_changed() else x
    dtype = product_dtype(x.dtype, weight)
    foreign = is_foreign(x) and not isinstance(x, Deferred)
    if foreign or dtype is None:
        return NotImplemented
    own, left, right, scale = adapted
    assert left is not None and right is not None
    if transposed:
        own, left, right = own.mT, right.mT, left.mT
    return project(x, Projection(own, bias, LowRank(right, left, scale)), dtype)


def _adapted(weight: Any) -> ExpertWeight | None:
    """W, L and R of such a weight, or of a cast of one (a router computes in float32)."""
    h = weight
    if isinstance(h, Deferred) and isinstance(h.op, Cast) and not h.is_changed():
        h = h.sources[0]
    if not isinstance(h, Deferred) or not isinstance(h.op, AdaptedWeight) or h.is_changed():
        return None
    weight.was_bypassed = h.was_bypassed = True
    own, left, right = h.sources
    return ExpertWeight(own, left, right, h.op.scale)
