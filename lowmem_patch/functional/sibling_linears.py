"""Linears with low-rank adapters that read one tensor, as one op: q, k and v, gate_proj and up_proj.

One by one, each adapter reads the whole of x for a small product, forward and backward, and autograd adds up
the gradients of x in passes of their own. Here the lora_A stand below each other, A = [A_1; A_2; ...]:

    low = x A^T,    y_i = x W_i^T + b_i + s_i low_i B_i^T
    d_low_i = s_i dy_i B_i,    d_x = d_low A + sum_i dy_i W_i
    d_W_i = dy_i^T x,    d_b_i = sum dy_i,    d_A = d_low^T x,    d_B_i = s_i dy_i^T low_i

and each product of the sum is added while it is computed. Saved: what the Linears save one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import padded_rank
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import Implementation, module, resolve
from lowmem_patch.functional.products import LowRank, scaled_product
from lowmem_patch.reference import cast
from lowmem_patch.tracing.gpu_temporaries import OF_OPERATORS, Temporary, sum_bytes

_OPERATOR = "sibling_linears"


class AdaptedLinear(NamedTuple):
    """A Linear's weight ``[O, F]`` and bias ``[O]`` or None, and the adapter beside it."""

    weight: Tensor
    bias: Tensor | None
    adapter: LowRank


class _Needs(NamedTuple):
    """Which gradients of one Linear are asked for."""

    weight: bool
    bias: bool
    lora_A: bool
    lora_B: bool


def _ranks(lora_Bs: Sequence[Tensor], dtype: torch.dtype) -> list[int]:
    return [padded_rank(lora_B.shape[1], dtype) for lora_B in lora_Bs]


def _columns(low: Tensor, lora_Bs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of each adapter, ``[rows, R]``."""
    return torch.split(low, _ranks(lora_Bs, low.dtype), dim=1)


def _empty_low(x: Tensor, lora_Bs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``[rows, sum of R]``"""
    return x.new_empty((x.numel() // x.shape[-1], sum(_ranks(lora_Bs, dtype))), dtype=dtype)


def _at_places(found: Sequence[Any], places: Sequence[int], count: int) -> list[Any]:
    """A list of ``count``, with None at all other places."""
    given = dict(zip(places, found, strict=True))
    return [given.get(place) for place in range(count)]


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scales: Sequence[float],
    compute_dtype: torch.dtype,
    implementation: str,
) -> list[Tensor]:
    """The outputs, and low ``[rows, sum of R]`` behind them, in ``compute_dtype``. ``biased`` says which
    Linears have the biases: torch knows no gradient of a list in which some are absent."""
    found = []
    all_biases = _at_places(biases, biased, len(weights))
    with _library.without_autocast(x.device.type):
        rows = cast(x, compute_dtype).reshape(-1, x.shape[-1])
        lora_A, padded_Bs = module(implementation).sibling_weights(lora_As, lora_Bs, compute_dtype)
        low = F.linear(rows, lora_A)
        parts = zip(weights, all_biases, _columns(low, lora_Bs), padded_Bs, scales, strict=True)
        for weight, bias, part, lora_B, scale in parts:
            # the adapter's product first, as in `products.linear_forward`
            if bias is None:
                y = scaled_product(scale, part, lora_B.t())
            else:
                y = torch.addmm(cast(bias, compute_dtype), part, lora_B.t(), alpha=scale)
            y.addmm_(rows, cast(weight, compute_dtype).t())
            found.append(y.resize_(*x.shape[:-1], weight.shape[0]))
    return [*found, low]


def _forward_fake(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    *_, lora_Bs, _, compute_dtype, _ = rest
    found = [x.new_empty((*x.shape[:-1], w.shape[0]), dtype=compute_dtype) for w in weights]
    return [*found, _empty_low(x, lora_Bs, compute_dtype)]


def _backward(
    dys: Sequence[Tensor],
    x: Any,
    weights: Sequence[Any],
    lora_As: Sequence[Any],
    lora_Bs: Sequence[Tensor],
    low: Any,
    scales: Sequence[float],
    for_x: bool,
    needs: Sequence[bool],
    implementation: str,
) -> list[Tensor]:
    """d_x, d_A ``[sum of R, F]``, and of each Linear those of weight, bias and lora_B, as far as they are
    asked for, in the dtype of the gradients ``dys``. What is not read may be None."""
    wanted = _by_linear(needs)
    for_A = any(need.lora_A for need in wanted)
    rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
    found, d_low = [], None
    with _library.without_autocast(dys[0].device.type):
        # first: torch's sum takes a multiple of dy for a while, and nothing else is there yet
        d_biases = [r.sum(0) if n.bias else None for r, n in zip(rows, wanted, strict=True)]
        if for_x or for_A:
            ops = module(implementation)
            d_low, lora_A = _low_gradients(ops, rows, lora_As, lora_Bs, scales)
            if for_x:
                found.append(_input_gradient(d_low, lora_A, rows, weights, dys[0].shape[:-1]))
        hidden: Any = None if x is None else cast(x, rows[0].dtype).reshape(-1, x.shape[-1])
        if for_A and d_low is not None:
            found.append(d_low.t().mm(hidden))
        lows: Any = [None] * len(dys) if low is None else _columns(low, lora_Bs)
        each = zip(wanted, rows, d_biases, lows, lora_Bs, scales, strict=True)
        for need, r, d_bias, part, lora_B, scale in each:
            d_weight = r.t().mm(hidden) if need.weight else None
            d_B = _d_lora_B(r, part, lora_B, scale) if need.lora_B else None
            found += filter(_is_given, (d_weight, d_bias, d_B))
    return found


def _is_given(one: Tensor | None) -> TypeGuard[Tensor]:
    return one is not None


def _d_lora_B(rows: Tensor, low: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    return scaled_product(scale, rows.t(), low).narrow(1, 0, lora_B.shape[1]).contiguous()


def _low_gradients(
    ops: Any,
    rows: Sequence[Tensor],
    lora_As: Sequence[Any],
    lora_Bs: Sequence[Tensor],
    scales: Sequence[float],
) -> tuple[Tensor, Any]:
    """d_low ``[rows, sum of R]``, and A if it is given."""
    dtype = rows[0].dtype
    lora_A, padded_Bs = ops.sibling_weights(lora_As, lora_Bs, dtype)
    d_low = _empty_low(rows[0], lora_Bs, dtype)
    for part, *factors, scale in zip(
        _columns(d_low, lora_Bs), rows, padded_Bs, scales, strict=True
    ):
        part.addmm_(*factors, beta=0, alpha=scale)
    return d_low, lora_A


def _input_gradient(
    d_low: Tensor,
    lora_A: Tensor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    shape: Sequence[int],
) -> Tensor:
    d_x = d_low.mm(lora_A)  # in the order of the forward
    for r, weight in zip(rows, weights, strict=True):
        d_x.addmm_(r, cast(weight, r.dtype))
    return d_x.view(*shape, d_x.shape[1])


def _by_linear(needs: Sequence[bool]) -> list[_Needs]:
    return [_Needs(*needs[i : i + 4]) for i in range(0, len(needs), 4)]


def _backward_fake(dys: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    x, weights, _, lora_Bs, _, _, for_x, needs, _ = rest
    like = dys[0]
    found = [like.new_empty((*like.shape[:-1], weights[0].shape[1]))] if for_x else []
    wanted = _by_linear(needs)
    if any(need.lora_A for need in wanted):
        found.append(like.new_empty((sum(_ranks(lora_Bs, like.dtype)), x.shape[-1])))
    for need, dy, lora_B in zip(wanted, dys, lora_Bs, strict=True):
        found += [dy.new_empty((dy.shape[-1], x.shape[-1]))] if need.weight else []
        found += [dy.new_empty(dy.shape[-1:])] if need.bias else []
        found += [dy.new_empty((dy.shape[-1], lora_B.shape[1]))] if need.lora_B else []
    return found


def _backward_temporary(dys: Sequence[Tensor], *rest: Any) -> Temporary:
    summed = [dy for dy, need in zip(dys, _by_linear(rest[-2]), strict=True) if need.bias]
    taken = (sum_bytes(dy, range(dy.dim() - 1)) for dy in summed)
    return Temporary(max(taken, default=0), beside_outputs=False)


_forward_op = _library.Operator(
    "sibling_linears(Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, Tensor[] lora_As, "
    "Tensor[] lora_Bs, float[] scales, ScalarType compute_dtype, str implementation) -> Tensor[]",
    _forward,
    _forward_fake,
)
_backward_op = _library.Operator(
    "sibling_linears_backward(Tensor[] dys, Tensor? x, Tensor?[] weights, Tensor?[] lora_As, "
    "Tensor[] lora_Bs, Tensor? low, float[] scales, bool for_x, bool[] needs, str implementation) "
    "-> Tensor[]",
    _backward,
    _backward_fake,
)
OF_OPERATORS[torch.ops.lowmem_patch.sibling_linears_backward.default] = _backward_temporary


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, weights, biases, biased, lora_As, lora_Bs, scales, _, chosen = inputs
    all_biases = _at_places(biases, biased, len(weights))
    given = [*chain.from_iterable(zip(weights, all_biases, lora_As, lora_Bs, strict=True))]
    # as the tensors say it: torch gives the needs of lists in several forms
    for_x, needs = x.requires_grad, [t is not None and t.requires_grad for t in given]
    wanted = _by_linear(needs)
    ctx.set_materialize_grads(False)
    # B tells its rank, also where nobody reads it
    ctx.save_for_backward(
        x if any(need.weight or need.lora_A for need in wanted) else None,
        output[-1] if any(need.lora_B for need in wanted) else None,
        *(weights if for_x else [None] * len(weights)),
        *(lora_As if for_x else [None] * len(weights)),
        *lora_Bs,
    )
    ctx.settings = (scales, for_x, needs, chosen)
    ctx.biased = biased
    ctx.dtypes = (x.dtype, [None if t is None else t.dtype for t in given])


@_library.first_order(_OPERATOR)
def _gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, list[Tensor | None]]:
    """Of x, and of the weight, the bias, lora_A and lora_B of each Linear."""
    scales, for_x, needs, chosen = ctx.settings
    x_dtype, dtypes = ctx.dtypes
    x, low, *weights = ctx.saved_tensors
    count = len(gradients)
    tables = [weights[place : place + count] for place in (0, count, 2 * count)]
    lora_Bs, asked = tables[2], needs
    dys: Sequence[Any] = gradients
    if not all(map(_is_given, gradients)):  # nobody read the others
        read = [*map(_is_given, gradients)]
        if not any(read):
            return None, [None] * len(needs)
        needs = [need and read[place // 4] for place, need in enumerate(needs)]
        low = None if low is None else torch.cat([*compress(_columns(low, lora_Bs), read)], 1)
        lists = (gradients, *tables, scales, _by_linear(needs))
        dys, *tables, scales, asked = ([*compress(one, read)] for one in lists)
        asked = [*chain.from_iterable(asked)]
    found = iter(_backward_op([*dys], x, *tables, low, scales, for_x, asked, chosen))
    d_x = cast(next(found), x_dtype) if for_x else None
    results = _by_argument(found, needs, gradients, lora_Bs)
    return d_x, [
        None if one is None else cast(one, dtype)
        for one, dtype in zip(results, dtypes, strict=True)
    ]


def _tables(given: Sequence[Any]) -> tuple[list[Any], ...]:
    """Weights, biases and whose they are, lora_A and lora_B of what is given Linear by Linear."""
    # no generator, which torch 2.11 compiles to nothing
    weights, biases, lora_As, lora_Bs = [[*given[i::4]] for i in range(4)]
    biased = [place for place, bias in enumerate(biases) if bias is not None]
    return weights, [biases[place] for place in biased], biased, lora_As, lora_Bs


class _SiblingLinears(torch.autograd.Function):
    """x, the dtype of the products, the implementation and the scales, then a weight, a bias, lora_A and
    lora_B of each Linear."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, chosen: str, scales: list[float], *given: Any
    ) -> tuple[Tensor, ...]:
        arguments = (x, *_tables(given), scales, dtype, chosen)
        output = _forward_op(*arguments)
        _save(ctx, arguments, output)
        return tuple(output[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        d_x, rest = _gradients(ctx, gradients)
        return (d_x, None, None, None, *rest)


def _operator_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    d_x, rest = _gradients(ctx, gradients[:-1])  # the last is low's
    d_weights, d_biases, d_As, d_Bs = [rest[i::4] for i in range(4)]
    d_biases = [d_biases[place] for place in ctx.biased]
    # an empty list is one of tensors, to torch
    of_biased: Any = None if ctx.biased else []
    return d_x, d_weights, d_biases, of_biased, d_As, d_Bs, None, None, None


_forward_op.has_gradient(_save, _operator_gradients)


def _by_argument(
    found: Iterator[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
    lora_Bs: Sequence[Tensor],
) -> Iterator[Tensor | None]:
    """The gradients of weights in the order of the arguments: the first has those of all lora_A."""
    parts: Any = repeat(None)
    if any(needs[2::4]):
        d_A = next(found)
        read = [B for B, dy in zip(lora_Bs, gradients, strict=True) if dy is not None]
        parts = iter(d_A.split(_ranks(read, d_A.dtype)))  # type: ignore[no-untyped-call]
    for need, dy, lora_B in zip(_by_linear(needs), gradients, lora_Bs, strict=True):
        part: Any = None if dy is None else next(parts)
        yield next(found) if need.weight else None
        yield next(found) if need.bias else None
        yield part[: lora_B.shape[1]] if need.lora_A else None
        yield next(found) if need.lora_B else None


def sibling_linears(
    x: Tensor,
    linears: Sequence[AdaptedLinear],
    compute_dtype: torch.dtype,
    *,
    implementation: Implementation = "auto",
) -> tuple[Tensor, ...]:
    """``F.linear`` of each, plus its adapter's product, of one tensor; saves what it is given, once.

    Nothing is checked: that would cost as much as a small kernel.

    Args:
        x: ``[..., F]``, any floating dtype.
        linears: two or more, of the same F.
        compute_dtype: of the products and of the results.
        implementation: of the adapters' casts; see `resolve`.

    Returns:
        ``[..., O]`` of each, in ``compute_dtype``.

    Raises:
        DoubleBackwardError: in a backward with ``create_graph=True``.
    """
    given = [t for one in linears for t in (one.weight, one.bias, *one.adapter[:2])]
    scales = [one.adapter.scale for one in linears]
    chosen = resolve(implementation, x, *(t for one in linears for t in one.adapter[:2]))
    if _library.in_compiler():
        *ys, _ = _forward_op(x, *_tables(given), scales, compute_dtype, chosen)
        return tuple(ys)
    found: tuple[Tensor, ...] = _apply(x, compute_dtype, chosen, scales, *given)
    return found


_apply = _library.direct_call(_SiblingLinears)
