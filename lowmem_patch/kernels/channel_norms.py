"""BatchNorm and GroupNorm with an activation behind them; see `lowmem_patch.functional.channel_norms`.

A plane is what one sample has of one channel. Contiguous tensors are one row a plane. Tensors whose channels
lie last are one column a channel; only BatchNorm reads those. A program takes a tile of rows and columns.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import ChannelNormInput
from lowmem_patch.kernels import _math
from lowmem_patch.kernels._launch import launches

_ELEMENTS = 2048  # of a tile
_NUM_WARPS = 4


def _rows(x: Tensor, groups: int) -> tuple[int, int, bool]:
    """As how many rows and columns ``[B, C, ...]`` is read, and whether the channels lie last.

    There are planes and their elements; or B times these, and C, where the channels lie last.
    """
    samples, channels, *rest = x.shape
    plane = prod(rest)
    if not groups and (plane == 1 or not x.is_contiguous()):
        return samples * plane, channels, True
    return samples * channels, plane, False


def _tile(columns: int) -> tuple[int, int]:
    block = min(_ELEMENTS, 1 << (max(columns, 16) - 1).bit_length())
    return _ELEMENTS // block, block


@triton.jit
def _normalized(
    x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, row, column, place, mask, known, channels,
    per_group, LAST: tl.constexpr, GROUPED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """z, y, rstd, and the weight; mask of the tile, ``known`` of its rows or of its columns."""
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if LAST:
        channel = column
        statistic = column
    else:
        channel = row % channels
        statistic = row // per_group if GROUPED else channel
    mean = tl.load(mean_ptr + statistic, mask=known, other=0.0)
    rstd = tl.load(rstd_ptr + statistic, mask=known, other=0.0)
    z = (x - mean) * rstd
    y = z
    weight = rstd * 0 + 1
    if WEIGHT:
        weight = tl.load(weight_ptr + channel, mask=known, other=0.0).to(tl.float32)
        y *= weight
    if BIAS:
        y += tl.load(bias_ptr + channel, mask=known, other=0.0).to(tl.float32)
    return z, y, rstd, weight


@triton.jit
def _place(column_blocks, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of one program's tile: rows, columns, places in memory, and which of them there are."""
    program = tl.program_id(0)
    row = (program // column_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, row.to(tl.int64) * columns + column, (row < rows) & (column < columns)


@triton.jit
def _gradient_of_y(dy_ptr, place, mask, y, KIND: tl.constexpr, PRECISE: tl.constexpr):
    d = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if KIND != "":
        _, slope = _math.activate_and_slope(y, KIND, PRECISE)
        d = _math.times_slope(d, slope, KIND)
    return d


@triton.jit(do_not_specialize=["rows", "column_blocks", "channels", "per_group", "units"])
def _elementwise_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, residual_ptr, result_ptr,
    rows, column_blocks, channels, per_group, units,
    GRADIENT: tl.constexpr, LAST: tl.constexpr, COARSE: tl.constexpr, RESIDUAL: tl.constexpr,
    GROUPED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, PRECISE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """h(y), or the gradient of y from that of h(y); y with the residual."""
    columns = units * UNIT
    row, column, place, mask = _place(column_blocks, rows, columns, ROWS, COLUMNS)
    known = column < columns if LAST else row < rows
    _, y, _, _ = _normalized(
        x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, row, column, place, mask, known, channels,
        per_group, LAST, GROUPED, WEIGHT, BIAS,
    )  # fmt: skip
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if GRADIENT:
        y = _gradient_of_y(dy_ptr, place, mask, y, KIND, PRECISE)
    elif KIND != "":
        y = _math.activate(y, KIND, PRECISE, COARSE)
    tl.store(result_ptr + place, y.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "channels", "per_group", "units"])
def _sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, sums_ptr,
    rows, channels, per_group, units,
    GROUPED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, PRECISE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each plane: the sums of the gradient of y, and of it times z."""
    columns = units * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    known = row < rows
    d_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    dz_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = known & (column < columns)
        place = row.to(tl.int64) * columns + column
        z, y, _, _ = _normalized(
            x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, row, column, place, mask, known, channels,
            per_group, False, GROUPED, WEIGHT, BIAS,
        )  # fmt: skip
        d = tl.where(mask, _gradient_of_y(dy_ptr, place, mask, y, KIND, PRECISE), 0.0)
        d_sum += d
        dz_sum += d * z
    tl.store(sums_ptr + row, tl.sum(d_sum, 1, keep_dims=True), mask=known)
    tl.store(sums_ptr + rows + row, tl.sum(dz_sum, 1, keep_dims=True), mask=known)


@triton.jit(do_not_specialize=[
    "rows", "column_blocks", "channels", "per_group", "statistics", "share", "units",
])  # fmt: skip
def _backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, sums_ptr, dx_ptr,
    rows, column_blocks, channels, per_group, statistics, share, units,
    GROUPED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, PRECISE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx, from the sums of g and of g z over the elements of each statistic, of which one is a ``share``."""
    columns = units * UNIT
    row, column, place, mask = _place(column_blocks, rows, columns, ROWS, COLUMNS)
    known = row < rows
    z, y, rstd, weight = _normalized(
        x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, row, column, place, mask, known, channels,
        per_group, False, GROUPED, WEIGHT, BIAS,
    )  # fmt: skip
    d = _gradient_of_y(dy_ptr, place, mask, y, KIND, PRECISE)
    statistic = row // per_group if GROUPED else row % channels
    g_mean = tl.load(sums_ptr + statistic, mask=known, other=0.0) * share
    gz_mean = tl.load(sums_ptr + statistics + statistic, mask=known, other=0.0) * share
    dx = rstd * (d * weight - g_mean - z * gz_mean)
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps", "units"])
def _statistics_kernel(
    x_ptr, mean_ptr, rstd_ptr, eps, units, UNIT: tl.constexpr, COLUMNS: tl.constexpr
):
    """Of one row. Sums are those of the distance to its first element: squares of large means cancel."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(x_ptr + row * columns).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - first, 0.0)
        total += x
        squares += x * x
    mean = tl.sum(total, 0) / columns
    variance = tl.sum(squares, 0) / columns - mean * mean
    tl.store(mean_ptr + row, first + mean)
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + eps))


_statistics_launch = launches(_statistics_kernel, 8, _ELEMENTS)
_elementwise_launch = launches(_elementwise_kernel, _NUM_WARPS)
_sums_launch = launches(_sums_kernel, _NUM_WARPS)
_backward_launch = launches(_backward_kernel, _NUM_WARPS)


def channel_statistics(
    x: Tensor,
    groups: int,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """As of the reference; x contiguous where there are groups."""
    if groups:
        rows = x.shape[0] * groups
        mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
        columns = x.numel() // rows
        unit = _unit(columns)
        _statistics_launch(unit)((rows, 1, 1), (x, mean, rstd), (eps, columns // unit))
        return mean, rstd
    if not x.is_cuda:  # Triton's interpreter
        given = (x.float(), None, None, running_mean, running_var, True, momentum, eps)
        return torch.native_batch_norm(*given)[1:]
    mean, rstd = torch.batch_norm_stats(x, eps)
    if running_mean is not None and running_var is not None:
        count = running_mean.new_full((1,), x.numel() // x.shape[1])
        torch.batch_norm_gather_stats_with_counts(  # torch's own update, as of one process of SyncBatchNorm
            x, mean[None], rstd[None], running_mean, running_var, momentum, eps, count
        )
    return mean, rstd


def _unit(columns: int) -> int:
    """In what a kernel counts columns: where rows begin at multiples of 16, it reads several at once."""
    return 16 if columns % 16 == 0 else 1


def _tensors(given: ChannelNormInput) -> tuple[Tensor, ...]:
    """An absent vector is never read."""
    vectors = (given.mean if v is None else v.contiguous() for v in (given.weight, given.bias))
    return given.x, given.mean, given.rstd, *vectors


def _constants(given: ChannelNormInput, dtype: torch.dtype) -> tuple[Any, ...]:
    has = (given.weight is not None, given.bias is not None)
    return given.groups > 0, *has, given.kind or "", dtype == torch.float32


def _elementwise(given: ChannelNormInput, dy: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """h(y), or the gradient of y from ``dy``."""
    x, groups, residual = given.x, given.groups, given.residual
    result = torch.empty_like(x, dtype=out_dtype)
    if x.numel() == 0:
        return result
    rows, columns, last = _rows(x, groups)
    unit, (block_rows, block_columns) = _unit(columns), _tile(columns)
    blocks, channels = -(-columns // block_columns), x.shape[1]
    own = (dy is not None, last, out_dtype == torch.bfloat16, given.residual is not None)
    constants = (*own, *_constants(given, out_dtype), unit, block_rows, block_columns)
    _elementwise_launch(*constants)(
        (-(-rows // block_rows) * blocks, 1, 1),
        (x if dy is None else dy, *_tensors(given), x if residual is None else residual, result),
        (rows, blocks, channels, channels // max(1, groups), columns // unit),
    )
    return result


def channel_norm_forward(given: ChannelNormInput, out_dtype: torch.dtype) -> Tensor:
    """As of the reference; x contiguous, or with its channels last where there are no groups."""
    return _elementwise(given, None, out_dtype)


def channel_sum_gradient(dy: Tensor, given: ChannelNormInput) -> Tensor:
    """As of the reference; x as of `channel_norm_forward`."""
    return _elementwise(given, _lying_as(given.x, dy), given.x.dtype)


def _lying_as(x: Tensor, dy: Tensor) -> Tensor:
    if dy.stride() == x.stride():
        return dy
    return torch.empty_like(x, dtype=dy.dtype).copy_(dy)


def channel_norm_backward(dy: Tensor, given: ChannelNormInput) -> tuple[Tensor, Tensor, Tensor]:
    """As of the reference; x as of `channel_norm_forward`."""
    x, mean, weight, groups = given.x, given.mean, given.weight, given.groups
    dy = _lying_as(x, dy)
    rows, columns, last = _rows(x, groups)
    if last:
        return _backward_of_columns(dy, given)
    samples, channels = x.shape[:2]
    per_group = channels // max(1, groups)
    unit, (block_rows, block_columns) = _unit(columns), _tile(columns)
    units = columns // unit
    row_blocks, blocks = -(-rows // block_rows), -(-columns // block_columns)
    tensors = (dy, *_tensors(given))
    constants = (*_constants(given, x.dtype), unit, block_rows, block_columns)
    sums = mean.new_empty(2, samples, channels)  # of d_y and of d_y z, in each plane
    _sums_launch(*constants)(
        (row_blocks, 1, 1), (*tensors, sums), (rows, channels, per_group, units)
    )
    vectors = sums.sum(1)
    if groups:
        found = sums if weight is None else sums * weight
        found = found.view(2, samples * groups, per_group).sum(2)
    else:
        found = vectors if weight is None else vectors * weight
    dx = torch.empty_like(x)
    statistics = found.shape[1]
    _backward_launch(*constants)(
        (row_blocks * blocks, 1, 1),
        (*tensors, found, dx),
        (rows, blocks, channels, per_group, statistics, statistics / x.numel(), units),
    )
    vectors = vectors if weight is None else vectors.to(weight.dtype)
    return dx, vectors[1], vectors[0]


def _backward_of_columns(dy: Tensor, given: ChannelNormInput) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a BatchNorm whose channels lie last, by torch's own."""
    x, mean, rstd, weight, *_ = given
    d = dy if given.kind is None else _elementwise(given, dy, x.dtype)
    scale = mean.new_ones(x.shape[1]) if weight is None else weight
    dtypes = (x.dtype, scale.dtype, scale.dtype)
    if not x.is_cuda:  # Triton's interpreter: a CPU takes one dtype for all, and adds up in that
        d, x, scale, mean, rstd = (t.double() for t in (d, x, scale, mean, rstd))
    found = torch.ops.aten.native_batch_norm_backward(
        d, x, scale, None, None, mean, rstd, True, 0.0, [True] * 3
    )
    dx, d_weight, d_bias = (one.to(dtype) for one, dtype in zip(found, dtypes, strict=True))
    return dx, d_weight, d_bias
