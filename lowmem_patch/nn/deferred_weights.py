"""An expert's weight with a low-rank adapter, W + s L R, which is made where it is read, and is never saved.

PEFT adapts the parameters of experts so, and its own forward makes a tensor as large as all experts for each
of them, which autograd saves. Linears and the matmuls of experts multiply with W, L and R one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import ExpertWeight, LowRank, RecomputedMatmul
from lowmem_patch.nn.context import is_foreign, product_dtype
from lowmem_patch.nn.deferred import Deferred, defer, value_of
from lowmem_patch.nn.deferred_casts import Cast
from lowmem_patch.nn.deferred_linears import project
from lowmem_patch.nn.deferred_rows import Product
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.tracing.op_roles import Role, function_name, role_of


class AdaptedWeight(Op):
    """``W + scale * L @ R`` of the sources W ``[.., F, O]``, L ``[.., F, r]`` and R ``[.., r, O]``."""

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

    def was_read(self, h: Any) -> None:
        h.let_go()

    def rearranged(
        self, h: Deferred, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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


def weight_of(weight: Any) -> ExpertWeight | None:
    """What a matmul multiplies with, None where it is left to the class of the weight."""
    if not is_foreign(weight):
        return ExpertWeight(weight)
    adapted = _adapted(weight)
    return adapted if adapted is None or adapted.weight.dtype == weight.dtype else None


def multiplied(func: Any, x: Tensor, weight: ExpertWeight, offsets: Tensor | None) -> Deferred:
    """``func(x, weight, offs=offsets)``, which saves x."""
    return Product.of(RecomputedMatmul(func, _itself, x, weight, offsets, (x,)))


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
    if left is None or right is None:
        return NotImplemented
    if transposed:
        own, left, right = own.mT, right.mT, left.mT
    adapter = LowRank(right, left, scale)
    return project(x, Projection(own, bias, adapter), dtype)


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
