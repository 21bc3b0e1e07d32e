"""The gradients of a norm's weight and bias: sums over rows, by columns, and over partial rows."""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from lowmem_patch.kernels._launch import Launch
from lowmem_patch.kernels.norm import load_vector, scales

__all__ = ["SUMS_COLUMNS", "TOTAL_COLUMNS", "sums_launch", "total_launch"]

# tile of the sum over partial rows: many loads in flight, and programs enough at 768 columns
TOTAL_ROWS = 128
TOTAL_COLUMNS = 16
TOTAL_WARPS = 8
SUMS_COLUMNS = 1024


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _sums_kernel(
    dy_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    sums_ptr,
    rows,
    rows_per_program,
    dy_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMALIZED: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d_weight and d_bias alone, by columns: for wide rows, and where dx is not asked for."""
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    bias = load_vector(bias_ptr, column, mask, HAS_BIAS, 0.0)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    first = group * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, rows)):
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        d_bias += dy
        if NEEDS_WEIGHT:
            y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
            d_weight += dy * (y - bias)
    partial = group * COLUMNS + column
    if NEEDS_WEIGHT:
        if not NORMALIZED:
            _, inverse, _ = scales(weight_ptr, bias_ptr, column, mask, True, False, OFFSET)
            d_weight *= inverse
        tl.store(sums_ptr + partial, d_weight, mask=mask)
        partial += tl.num_programs(1).to(tl.int64) * COLUMNS
    if NEEDS_BIAS:
        tl.store(sums_ptr + partial, d_bias, mask=mask)


@triton.jit(do_not_specialize=["programs"])
def _total_kernel(
    sums_ptr,
    first_ptr,
    second_ptr,
    programs,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The partial rows of one or two vectors to their sums, rounded once to the parameter's dtype."""
    which = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for start in range(0, programs, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < programs)[:, None] & inside[None, :]
        offset = (which * programs + row).to(tl.int64) * COLUMNS
        total += tl.load(sums_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, axis=0)
    if which == 0:
        tl.store(first_ptr + column, result.to(first_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(second_ptr + column, result.to(second_ptr.dtype.element_ty), mask=inside)


@cache
def sums_launch(
    columns: int,
    has_bias: bool,
    weight_offset: float,
    normalized: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> Launch:
    return Launch(
        _sums_kernel,
        4,
        COLUMNS=columns,
        HAS_BIAS=has_bias,
        OFFSET=weight_offset,
        NORMALIZED=normalized,
        NEEDS_WEIGHT=needs_weight,
        NEEDS_BIAS=needs_bias,
        BLOCK=SUMS_COLUMNS,
    )


@cache
def total_launch(columns: int) -> Launch:
    return Launch(
        _total_kernel, TOTAL_WARPS, COLUMNS=columns, BLOCK_ROWS=TOTAL_ROWS, BLOCK=TOTAL_COLUMNS
    )
