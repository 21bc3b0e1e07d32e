"""Products of trained weights whose input is computed again in backward, from what is saved anyway.

A Linear, or a grouped or batched matmul (one weight per expert), saves its input x for the weight's gradient.
Here it saves the tensors ``sources`` with x = again(sources): gate and up of act(gate) up, or a tensor of
which x is some rows. x's own gradient goes to the node that made x.

Experts multiply each row of their last product, y = x W, with a routing weight w, whose gradient is
<dy, y>; a shared expert does with its gate. y need not be saved for it:

    d_hidden = dy W^T,    d_w = <dy, x W> = <d_hidden, x>,    d_x = w d_hidden,    d_W = x^T (w dy)

Where a bias b[i] of each row's expert i is added to y, d_w = <d_hidden, x> + <dy, b[i]>, and d_b[i] += w dy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.constants import wide
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import resolve
from lowmem_patch.functional.products import (
    IDENTITY,
    LowRank,
    PackedWeight,
    linear_of,
    split_packed,
    unpacked,
)
from lowmem_patch.functional.products_backward import linear_backward, one_for_each

Again = Callable[..., Tensor]


class ExpertWeight(NamedTuple):
    """``weight + scale * left @ right``, which is not made where a matmul reads it.

        y = x W + s (x L) R,     d_low = s dy R^T,     d_x = dy W^T + d_low L^T
        d_L = x^T d_low,         d_R = s (x L)^T dy

    Attributes:
        weight: ``[F, O]``, or one for each expert, ``[E, F, O]``.
        left, right: of a low-rank adapter, ``[.., F, r]`` and ``[.., r, O]``; None without one.
    """

    weight: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    scale: float = 1.0

    @property
    def trains(self) -> bool:
        tensors = (self.weight, self.left, self.right)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _saved(ctx: Any) -> tuple[Any, ...]:
    return _library.saved_tensors(ctx, "a weight, or what a value is computed of again,")


class RowBias(NamedTuple):
    """``bias[numbers]``, which is added to a product; it is gathered again in backward.

    Attributes:
        rows: ``[S, O]``; its gradient flows to the node that gathered it.
        bias: ``[E, O]``; no gradient flows to it from here.
        numbers: ``[S]``, whole.
    """

    rows: Tensor
    bias: Tensor
    numbers: Tensor


class RecomputedMatmul(NamedTuple):
    """``multiply(x, weight)``, which saves ``sources`` and not x.

    Attributes:
        multiply: torch's mm, bmm or grouped_mm.
        again: gives x, from ``sources``.
        x: ``[S, F]``, of a batch ``[E, S, F]``; its gradient flows to the node that computed it.
        weight: whose adapter multiplies x as well.
        offsets: of grouped_mm alone: ``[E]``, the end of each expert's rows.
        sources: no gradient flows to them from here.
    """

    multiply: Callable[..., Tensor]
    again: Again
    x: Tensor
    weight: ExpertWeight
    offsets: Tensor | None
    sources: tuple[Tensor, ...]

    def product(self) -> Tensor:
        """``[S, O]``, of a batch ``[E, S, O]``."""
        return self._apply(None, None, None)

    def weighted(self, product: Tensor, factors: Tensor, bias: RowBias | None = None) -> Tensor:
        """``product * factors``, without a saved product.

        Args:
            product: what `product` gave, and ``bias`` added to it; no gradient flows to it.
            factors: ``[S, 1]``, floating point.
        """
        return self._apply(product.detach(), factors, bias)

    def _apply(
        self, product: Tensor | None, factors: Tensor | None, bias: RowBias | None
    ) -> Tensor:
        multiply, again, x, weight, offsets, sources = self
        added = (None, None, None) if bias is None else bias
        rest = (multiply, again, x, *weight, offsets, *sources)
        return _Matmul.apply(product, factors, *added, *rest)


def matrix_product(x: Tensor, weight: Tensor) -> Tensor:
    """``[S, O]``, as a `RecomputedMatmul` of one expert for all rows multiplies."""
    return x.mm(weight)


class _Matmul(_library.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor | None,
        factors: Tensor | None,
        bias_rows: Tensor | None,
        bias: Tensor | None,
        numbers: Tensor | None,
        multiply: Callable[..., Tensor],
        again: Again,
        x: Tensor,
        weight: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        scale: float,
        offsets: Tensor | None,
        *sources: Tensor,
    ) -> Tensor:
        _library.see_undefined(ctx)
        _, for_factors, *_, for_x, for_weight, for_left, for_right = ctx.needs_input_grad[:11]
        for_hidden, for_adapter = for_x or for_factors, for_left or for_right
        reads_x = for_weight or for_adapter or for_factors
        adapts = for_hidden or for_adapter
        ctx.save_for_backward(
            factors,
            bias if for_factors else None,
            numbers if for_factors else None,
            weight if for_hidden else None,
            left if adapts else None,
            right if adapts else None,
            offsets,
            *(sources if reads_x else ()),
        )
        ctx.multiply, ctx.again, ctx.dtype, ctx.scale = multiply, again, x.dtype, scale
        ctx.number, ctx.transposed = len(sources), weight.stride(-1) != 1
        if product is not None and factors is not None:
            return product * factors
        multiply = _bound(multiply, offsets)
        return _adapted_product(multiply, x, weight, left, right, scale)

    @staticmethod
    @_library.first_order("recomputed_matmul")
    def backward(ctx: Any, dy: Tensor) -> Any:
        factors, bias, numbers, weight, left, right, offsets, *sources = _saved(ctx)
        needs = ctx.needs_input_grad[:11]
        _, for_factors, for_bias, *_, for_x, for_weight, for_left, for_right = needs
        multiply = _bound(ctx.multiply, offsets)
        d_hidden: Any = None
        d_factors = d_weight = d_left = d_right = None
        x: Any = ctx.again(*sources) if sources else None
        rows = dy.to(ctx.dtype).contiguous()
        if weight is not None:
            down, up = (None, None) if left is None else (right.mT, left.mT)
            d_hidden = _adapted_product(multiply, rows, weight.mT, down, up, ctx.scale)
        if for_factors:
            d_factors = _row_sums((d_hidden, x), *([] if bias is None else [(dy, bias[numbers])]))
            d_factors = d_factors.to(factors.dtype)
        if factors is not None:
            d_hidden = d_hidden.mul_(factors) if for_x else None  # in one rounding, also of float32
            if any((for_weight, for_left, for_right, for_bias)):
                rows = (dy * factors).to(ctx.dtype).contiguous()
        if for_weight:
            # as torch's own backward: equal bits, and the weight's layout, or else the gradient is copied
            d_weight = multiply(rows.mT, x).mT if ctx.transposed else multiply(x.mT, rows)
        if for_left:
            d_left = multiply(x.mT, multiply(rows, right.mT)).mul_(ctx.scale)
        if for_right:
            d_right = multiply(multiply(x, left).mT, rows).mul_(ctx.scale)
        d_x, d_bias = d_hidden if for_x else None, rows if for_bias else None
        found = (d_factors, d_bias, None, None, None, None, d_x, d_weight, d_left, d_right)
        return None, *found, *(None,) * (2 + ctx.number)


def _adapted_product(
    multiply: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    scale: float,
) -> Tensor:
    """x W + s (x L) R."""
    y = multiply(x, weight)
    return y if left is None else y.add_(multiply(multiply(x, left), right), alpha=scale)


def _row_sums(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """The sum of <left, right> of each row, ``[.., 1]``, at least in float32."""
    dtype = wide(pairs[0][0].dtype)
    sums = [(left * right).sum(-1, keepdim=True, dtype=dtype) for left, right in pairs]
    return sum(sums[1:], start=sums[0])


def _bound(multiply: Callable[..., Tensor], offsets: Tensor | None) -> Callable[..., Tensor]:
    return multiply if offsets is None else partial(multiply, offs=offsets)


class _Linear(_library.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor | None,
        again: Again,
        weight: Tensor | PackedWeight,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        scale: float,
        compute_dtype: torch.dtype,
        *sources: Tensor,
    ) -> Tensor:
        _library.see_undefined(ctx)
        for_x, _, _, *for_rest = ctx.needs_input_grad[:7]
        x = x if value is None else value
        for_weight, _, for_A, for_B = for_rest
        implementation = resolve("auto", x)
        given = (weight, bias, lora_A, lora_B, scale, IDENTITY, compute_dtype, implementation)
        y, low = linear_of(x, x, None, *given)
        reads_B = for_x or for_A or for_B
        adapter = (lora_A if for_x else None, lora_B if reads_B else None, low if for_B else None)
        read = sources if for_weight or for_A else ()
        ctx.packed, saved_weight = split_packed(weight if for_x else None)
        ctx.save_for_backward(saved_weight, *adapter, *read)
        ctx.again, ctx.number, ctx.needs = again, len(sources), (for_x, *for_rest)
        ctx.settings = (scale, IDENTITY, ctx.needs, implementation)
        # an absent tensor's dtype is never read
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, lora_A, lora_B)]
        made: Tensor = y
        return made

    @staticmethod
    @_library.first_order("recomputed_linear")
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, lora_A, lora_B, low, *sources = _saved(ctx)
        if ctx.packed is not None:
            weight = unpacked(ctx.packed, dy.dtype)
        x = ctx.again(*sources, dtype=dy.dtype) if sources else None
        found = linear_backward(dy, x, None, weight, lora_A, lora_B, low, *ctx.settings)
        d_x, *others = one_for_each(found, ctx.needs, ctx.dtypes)
        return d_x, None, None, *others, None, None, *(None,) * ctx.number


def recomputed_linear(
    x: Tensor,
    again: Again,
    sources: tuple[Tensor, ...],
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    adapter: LowRank | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """F.linear(x, weight, bias), plus an adapter's product, that saves ``sources`` and not x.

    The gradient of x flows to the node that computed it, and none to the sources.

    Args:
        x: ``[..., F]``.
        again: gives x in a ``dtype``, from the sources.
        sources: what x is computed from.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        compute_dtype: x and the weights are cast to it; the casts are repeated in backward.
        adapter: a low-rank adapter beside the Linear.
        value: x's values, where x is a deferred tensor, which has none: autograd sees no read of them then.

    Returns:
        ``[..., O]`` in ``compute_dtype``.
    """
    low_rank = (None, None, 1.0) if adapter is None else adapter
    return _Linear.apply(x, value, again, weight, bias, *low_rank, compute_dtype, *sources)
