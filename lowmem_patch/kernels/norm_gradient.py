"""LayerNorm and RMSNorm backward from the output: x is not needed.

With gamma = weight + offset, z = (y - bias) / gamma (0 where gamma is 0), g = dy gamma and means over
a row: d(x - mean) = rstd (g - z mean(g z)), since z's own mean square is 1 up to eps, and
    dx = rstd (g - mean(g) - z mean(g z)),    since mean(z) = 0; RMSNorm has no mean(g).
    d_weight = sum over rows of dy z,    d_bias = sum over rows of dy.
Saved: y, rstd, weight, bias.
The sums over rows go to one partial row per program, then to one sum: no atomics, same bits each run.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import (
    BACKWARD_COLUMNS,
    as_rows,
    contiguous,
    norm_settings,
    on_device,
    persistent_programs,
)
from lowmem_patch.kernels.norm import load_vector

__all__ = ["norm_backward"]


@triton.jit
def _scales(
    weight_ptr,
    bias_ptr,
    column,
    mask,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """gamma, 1 / gamma (0 where gamma is 0) and bias of some columns."""
    gamma = load_vector(weight_ptr, column, mask, HAS_WEIGHT, 1.0)
    if HAS_WEIGHT:
        gamma += OFFSET
    inverse = tl.where(gamma == 0.0, 0.0, 1.0 / tl.where(gamma == 0.0, 1.0, gamma))
    return gamma, inverse, load_vector(bias_ptr, column, mask, HAS_BIAS, 0.0)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    dy_ptr,
    y_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    dx_ptr,
    d_weight_ptr,
    d_bias_ptr,
    rows,
    tiles,
    dy_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gamma, inverse, bias = _scales(
        weight_ptr, bias_ptr, column, inside, HAS_WEIGHT, HAS_BIAS, OFFSET
    )
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0.0)
        y = tl.load(y_ptr + row[:, None] * y_stride + column[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        dy = dy.to(tl.float32)
        # columns and rows outside have dy = 0, so their z counts nowhere
        z = (y.to(tl.float32) - bias[None, :]) * inverse[None, :]
        if NEEDS_WEIGHT:
            d_weight += tl.sum(dy * z, axis=0)
        if NEEDS_BIAS:
            d_bias += tl.sum(dy, axis=0)
        g = dy * gamma[None, :]
        along_z = tl.sum(g * z, axis=1) * (1.0 / COLUMNS)
        dx = g - z * along_z[:, None]
        if CENTERED:
            dx -= (tl.sum(g, axis=1) * (1.0 / COLUMNS))[:, None]
        dx = (dx * rstd[:, None]).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row[:, None] * COLUMNS + column[None, :], dx, mask=mask)
    partial = program.to(tl.int64) * COLUMNS + column
    if NEEDS_WEIGHT:
        tl.store(d_weight_ptr + partial, d_weight, mask=inside)
    if NEEDS_BIAS:
        tl.store(d_bias_ptr + partial, d_bias, mask=inside)


@triton.jit
def _backward_wide_kernel(
    dy_ptr,
    y_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    dx_ptr,
    dy_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    rstd = tl.load(rstd_ptr + row)
    sum_g = tl.zeros((BLOCK,), tl.float32)
    sum_gz = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        gamma, inverse, bias = _scales(
            weight_ptr, bias_ptr, column, mask, HAS_WEIGHT, HAS_BIAS, OFFSET
        )
        g = tl.load(dy_ptr + column, mask=mask, other=0.0).to(tl.float32) * gamma
        y = tl.load(y_ptr + column, mask=mask, other=0.0).to(tl.float32)
        sum_g += g
        sum_gz += g * (y - bias) * inverse
    along_z = tl.sum(sum_gz) * (1.0 / COLUMNS)
    mean_g = tl.sum(sum_g) * (1.0 / COLUMNS)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        gamma, inverse, bias = _scales(
            weight_ptr, bias_ptr, column, mask, HAS_WEIGHT, HAS_BIAS, OFFSET
        )
        g = tl.load(dy_ptr + column, mask=mask, other=0.0).to(tl.float32) * gamma
        y = tl.load(y_ptr + column, mask=mask, other=0.0).to(tl.float32)
        dx = g - (y - bias) * inverse * along_z
        if CENTERED:
            dx -= mean_g
        tl.store(
            dx_ptr + row * COLUMNS + column, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=mask
        )


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _sums_kernel(
    dy_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    d_weight_ptr,
    d_bias_ptr,
    rows,
    rows_per_program,
    dy_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d_weight and d_bias alone, by columns: for wide rows, and where dx is not asked for."""
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    _, inverse, bias = _scales(weight_ptr, bias_ptr, column, mask, HAS_WEIGHT, HAS_BIAS, OFFSET)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    first = group * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, rows)):
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        d_bias += dy
        if NEEDS_WEIGHT:
            y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
            d_weight += dy * (y - bias) * inverse
    if NEEDS_WEIGHT:
        tl.store(d_weight_ptr + group * COLUMNS + column, d_weight, mask=mask)
    if NEEDS_BIAS:
        tl.store(d_bias_ptr + group * COLUMNS + column, d_bias, mask=mask)


def norm_backward(
    dy: Tensor,
    y: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    centered: bool,
    input_dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx ``[..., N]`` in ``input_dtype``, d_weight and d_bias ``[N]`` in their parameters' dtypes."""
    columns = dy.shape[-1]
    rows = dy.numel() // columns if columns else 0
    needs_weight = needs_weight and weight is not None
    needs_bias = needs_bias and bias is not None
    dx = torch.empty(dy.shape, dtype=input_dtype, device=dy.device) if needs_input else None
    if rows == 0:
        d_weight = torch.zeros_like(weight) if needs_weight and weight is not None else None
        d_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        return dx, d_weight, d_bias
    dy, dy_stride = as_rows(dy)
    if needs_input or needs_weight:
        y, y_stride = as_rows(y)
    else:
        y, y_stride = dy, dy_stride
    weight, bias = contiguous(weight), contiguous(bias)
    settings = norm_settings(columns, BACKWARD_COLUMNS)
    flags = {
        "COLUMNS": columns,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "OFFSET": weight_offset,
        "BLOCK": settings.block_columns,
        "num_warps": settings.num_warps,
    }
    vectors = (dy if weight is None else weight, dy if bias is None else bias)
    fused = dx is not None and columns <= BACKWARD_COLUMNS
    tiles = triton.cdiv(rows, settings.block_rows)
    if not (needs_weight or needs_bias):
        programs = tiles
    elif fused:
        elements = settings.block_rows * settings.block_columns
        programs = persistent_programs(dy.device, tiles, elements)
    else:
        programs = persistent_programs(dy.device, rows, columns)
    weight_sums = _partial_sums(dy, programs, needs_weight)
    bias_sums = _partial_sums(dy, programs, needs_bias)
    sums = (dy if weight_sums is None else weight_sums, dy if bias_sums is None else bias_sums)
    with on_device(dy):
        if dx is not None and fused:
            _backward_kernel[(programs,)](
                dy,
                y,
                rstd,
                *vectors,
                dx,
                *sums,
                rows,
                tiles,
                dy_stride,
                y_stride,
                CENTERED=centered,
                NEEDS_WEIGHT=needs_weight,
                NEEDS_BIAS=needs_bias,
                BLOCK_ROWS=settings.block_rows,
                **flags,
            )
        elif dx is not None:
            _backward_wide_kernel[(rows,)](
                dy, y, rstd, *vectors, dx, dy_stride, y_stride, CENTERED=centered, **flags
            )
        if not fused and (needs_weight or needs_bias):
            rows_per_program = triton.cdiv(rows, programs)
            _sums_kernel[(triton.cdiv(columns, settings.block_columns), programs)](
                dy,
                y,
                *vectors,
                *sums,
                rows,
                rows_per_program,
                dy_stride,
                y_stride,
                NEEDS_WEIGHT=needs_weight,
                NEEDS_BIAS=needs_bias,
                **flags,
            )
    return dx, _total(weight_sums, weight), _total(bias_sums, bias)


def _partial_sums(like: Tensor, programs: int, needed: bool) -> Tensor | None:
    if not needed:
        return None
    shape = (programs, like.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _total(sums: Tensor | None, vector: Tensor | None) -> Tensor | None:
    """The second stage; the sum is rounded once, to the parameter's dtype."""
    if sums is None or vector is None:
        return None
    return sums.sum(0).to(vector.dtype)
