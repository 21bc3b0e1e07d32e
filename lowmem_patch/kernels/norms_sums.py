"""The gradients of a norm's weight and bias: sums over rows, by columns, and over partial rows.

The sums over rows go to one partial row per program, then to one sum: no atomics, same bits each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import NormSettings
from lowmem_patch.kernels._launch import Launch, launches, multiprocessors
from lowmem_patch.kernels.norms import affine_constants, load_vector, scales

# tile of the sum over partial rows: many loads in flight, and programs enough at 768 columns
TOTAL_ROWS = 128
TOTAL_COLUMNS = 16
TOTAL_WARPS = 8
SUMS_COLUMNS = 1024


class BackwardCase(NamedTuple):
    """What the kernels of a norm's backward are compiled for, beside the dtypes."""

    columns: int
    has_weight: bool
    has_bias: bool
    settings: NormSettings
    normalized: bool
    needs_weight: bool
    needs_bias: bool


@triton.jit
def store_sums(
    sums_ptr,
    program, programs, column, mask, d_weight, d_bias, inverse,
    COLUMNS: tl.constexpr, NORMALIZED: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
):  # fmt: skip
    """The sums of one program to its partial rows; that of dy (y - bias) is divided by gamma."""
    partial = program.to(tl.int64) * COLUMNS + column
    if NEEDS_WEIGHT:
        if not NORMALIZED:
            d_weight *= inverse
        tl.store(sums_ptr + partial, d_weight, mask=mask)
        partial += programs.to(tl.int64) * COLUMNS
    if NEEDS_BIAS:
        tl.store(sums_ptr + partial, d_bias, mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _sums_kernel(
    dy_ptr, y_ptr, weight_ptr, bias_ptr, sums_ptr,
    rows, rows_per_program, dy_stride, y_stride,
    COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    NORMALIZED: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, NEEDS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d_weight and d_bias alone, by columns: for long rows, and where dx is not asked for."""
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
    divides: tl.constexpr = NEEDS_WEIGHT and not NORMALIZED
    _, inverse, _ = scales(weight_ptr, bias_ptr, column, mask, divides, False, OFFSET)
    store_sums(
        sums_ptr, group, tl.num_programs(1), column, mask, d_weight, d_bias, inverse,
        COLUMNS, NORMALIZED, NEEDS_WEIGHT, NEEDS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def _total_kernel(
    sums_ptr, first_ptr, second_ptr,
    programs,
    COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def _sums_launch(case: BackwardCase) -> Launch:
    return Launch(
        _sums_kernel,
        4,
        COLUMNS=case.columns,
        **affine_constants(case.has_weight, case.has_bias, case.settings),
        NORMALIZED=case.normalized,
        NEEDS_WEIGHT=case.needs_weight,
        NEEDS_BIAS=case.needs_bias,
        BLOCK=SUMS_COLUMNS,
    )


_total_launch = launches(_total_kernel, TOTAL_WARPS)


def partial_sums(case: BackwardCase, like: Tensor, programs: int) -> Tensor:
    """Memory for the partial rows, ``[one or two vectors, programs, N]``."""
    vectors = case.needs_weight + case.needs_bias
    return like.new_empty(vectors, programs, case.columns, dtype=torch.float32)


def sum_columns(
    case: BackwardCase, tensors: Sequence[Tensor], rows: int, strides: tuple[int, int]
) -> Tensor:
    """The partial rows of d_weight and d_bias.

    Args:
        tensors: dy, y, weight and bias, what is absent replaced by any other.
        strides: between the rows of dy and of y.
    """
    dy, columns = tensors[0], case.columns
    # sums by column walk over rows; each program should find some
    programs = min(rows, max(1, 16 * multiprocessors(dy.device) * SUMS_COLUMNS // columns))
    rows_per_program = -(-rows // programs)
    programs = -(-rows // rows_per_program)
    sums = partial_sums(case, dy, programs)
    grid = (-(-columns // SUMS_COLUMNS), programs, 1)
    _sums_launch(case)(grid, (*tensors, sums), (rows, rows_per_program), strides)
    return sums


def sum_partial(sums: Tensor, vectors: Sequence[Tensor]) -> None:
    """The partial rows to their sums, in one or two ``[N]``."""
    _, programs, columns = sums.shape
    grid = (-(-columns // TOTAL_COLUMNS), len(vectors), 1)
    _total_launch(columns, TOTAL_ROWS, TOTAL_COLUMNS)(
        grid, (sums, vectors[0], vectors[-1]), (programs,)
    )
