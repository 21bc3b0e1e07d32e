"""LayerNorm and RMSNorm backward from the output: x is not needed.

With gamma = weight + offset, u = y - bias, z = u / gamma (0 where gamma is 0), g = dy gamma and means
over a row: d(x - mean) = rstd (g - z mean(g z)), since z's own mean square is 1 up to eps. g z = dy u
needs no division, so
    dx = rstd (g - mean(g) - z mean(dy u)),    since mean(z) = 0; RMSNorm has no mean(g).
    d_weight = (sum over rows of dy u) / gamma,    d_bias = sum over rows of dy.
Saved: y, rstd, weight, bias. Where z was saved instead (NORMALIZED), nothing is divided:
    dx = rstd (g - mean(g) - z mean(g z)),    d_weight = sum over rows of dy z.
The sums over rows go to one partial row per program, then to one sum: no atomics, same bits each run.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import (
    BACKWARD_COLUMNS,
    Launch,
    NormSettings,
    as_rows,
    backward_settings,
    contiguous,
    empty,
    multiprocessors,
)
from lowmem_patch.kernels.norm import load_vector, scales
from lowmem_patch.kernels.norm_sums import SUMS_COLUMNS, TOTAL_COLUMNS, sums_launch, total_launch

__all__ = ["norm_backward"]


# Compiled without contraction, which would round g once in its mean and not at all in g - mean(g): for
# rows that are (nearly) constant the difference is not 0, and rstd multiplies it.
@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    dy_ptr,
    y_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    tiles,
    dy_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    RELOAD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    if not RELOAD:
        gamma, inverse, bias = scales(
            weight_ptr, bias_ptr, column, inside, HAS_WEIGHT, HAS_BIAS, OFFSET
        )
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = inside[None, :]
        if BLOCK_ROWS > 1:
            mask = (row < rows)[:, None] & mask
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0.0)
        y = tl.load(y_ptr + row[:, None] * y_stride + column[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if RELOAD:
            bias = load_vector(bias_ptr, column, inside, HAS_BIAS, 0.0)
        # columns and rows outside have dy = 0, so their u counts nowhere
        g = dy.to(tl.float32)
        z = y.to(tl.float32)
        if HAS_BIAS:
            z -= bias[None, :]
        product = g * z
        if NEEDS_WEIGHT:
            d_weight += tl.sum(product, axis=0)
        if NEEDS_BIAS:
            d_bias += tl.sum(g, axis=0)
        if not NORMALIZED:
            along_z = tl.sum(product, axis=1) * (1.0 / COLUMNS)
        if RELOAD:
            gamma, inverse, _ = scales(
                weight_ptr, bias_ptr, column, inside, HAS_WEIGHT, False, OFFSET
            )
        if NORMALIZED:
            if HAS_WEIGHT:
                product *= gamma[None, :]
            along_z = tl.sum(product, axis=1) * (1.0 / COLUMNS)
        if HAS_WEIGHT:
            g *= gamma[None, :]
            if not NORMALIZED:
                z *= inverse[None, :]
        if CENTERED:
            g -= (tl.sum(g, axis=1) * (1.0 / COLUMNS))[:, None]
        dx = tl.fma(z, -along_z[:, None], g) * rstd[:, None]
        dx_row = dx_ptr + row[:, None] * COLUMNS + column[None, :]
        tl.store(dx_row, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial = program.to(tl.int64) * COLUMNS + column
    if NEEDS_WEIGHT:
        if not NORMALIZED:
            if RELOAD:
                _, inverse, _ = scales(weight_ptr, bias_ptr, column, inside, True, False, OFFSET)
            d_weight *= inverse
        tl.store(sums_ptr + partial, d_weight, mask=inside)
        partial += tl.num_programs(0).to(tl.int64) * COLUMNS
    if NEEDS_BIAS:
        tl.store(sums_ptr + partial, d_bias, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_wide_kernel(
    dy_ptr,
    y_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    dx_ptr,
    rows,
    dy_stride,
    y_stride,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
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
        gamma, _, bias = scales(weight_ptr, bias_ptr, column, mask, HAS_WEIGHT, HAS_BIAS, OFFSET)
        dy = tl.load(dy_ptr + column, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + column, mask=mask, other=0.0).to(tl.float32)
        sum_g += dy * gamma
        if NORMALIZED:
            sum_gz += dy * gamma * y
        else:
            sum_gz += dy * (y - bias)
    along_z = tl.sum(sum_gz) * (1.0 / COLUMNS)
    mean_g = tl.sum(sum_g) * (1.0 / COLUMNS)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        gamma, inverse, bias = scales(
            weight_ptr, bias_ptr, column, mask, HAS_WEIGHT, HAS_BIAS, OFFSET
        )
        g = tl.load(dy_ptr + column, mask=mask, other=0.0).to(tl.float32) * gamma
        y = tl.load(y_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if CENTERED:
            g -= mean_g
        z = y
        if not NORMALIZED:
            z = (y - bias) * inverse
        dx = tl.fma(z, -along_z, g) * rstd
        tl.store(dx_ptr + row * COLUMNS + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@cache
def _dx_launch(
    columns: int,
    nbytes: int,
    has_weight: bool,
    has_bias: bool,
    weight_offset: float,
    centered: bool,
    normalized: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Launch, NormSettings]:
    settings = backward_settings(columns, nbytes, has_weight + has_bias, needs_weight or needs_bias)
    constants: dict[str, Any] = {
        "COLUMNS": columns,
        "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias,
        "OFFSET": weight_offset,
        "CENTERED": centered,
        "NORMALIZED": normalized,
    }
    kernel = _backward_wide_kernel
    if columns <= BACKWARD_COLUMNS:
        kernel = _backward_kernel
        constants |= {
            "NEEDS_WEIGHT": needs_weight,
            "NEEDS_BIAS": needs_bias,
            "RELOAD": settings.reload,
            "STAGES": settings.num_stages,
            "BLOCK_ROWS": settings.block_rows,
        }
    constants["BLOCK"] = settings.block_columns
    return Launch(kernel, settings.num_warps, fuse=False, **constants), settings


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
    normalized: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx ``[..., N]`` in ``input_dtype``, d_weight and d_bias ``[N]`` in their parameters' dtypes.

    ``normalized``: z stands in the place of y.
    """
    columns = dy.shape[-1]
    rows = dy.numel() // columns if columns else 0
    needs_weight = needs_weight and weight is not None
    needs_bias = needs_bias and bias is not None
    dx = empty(dy, input_dtype) if needs_input else None
    d_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
    d_bias = torch.empty_like(bias) if needs_bias and bias is not None else None
    if rows == 0:
        return (
            dx,
            None if d_weight is None else d_weight.zero_(),
            None if d_bias is None else d_bias.zero_(),
        )
    dy, dy_stride = as_rows(dy)
    y, y_stride = as_rows(y) if needs_input or needs_weight else (dy, dy_stride)
    weight, bias = contiguous(weight), None if normalized else contiguous(bias)
    # an absent vector is never read; any pointer will do
    tensors = (dy, y, rstd, dy if weight is None else weight, dy if bias is None else bias)
    strides = (dy_stride, y_stride)
    wanted = [vector for vector in (d_weight, d_bias) if vector is not None]
    fused = dx is not None and columns <= BACKWARD_COLUMNS
    sums, programs = dy, 0
    if wanted and not fused:
        # sums by column walk over rows; each program should find some
        programs = min(rows, max(1, 16 * multiprocessors(dy.device) * SUMS_COLUMNS // columns))
        rows_per_program = -(-rows // programs)
        programs = -(-rows // rows_per_program)
        sums = _partial_sums(dy, len(wanted), programs)
        launch = sums_launch(
            columns, bias is not None, weight_offset, normalized, needs_weight, needs_bias
        )
        grid = (-(-columns // SUMS_COLUMNS), programs, 1)
        launch(grid, (dy, y, *tensors[3:], sums), (rows, rows_per_program), strides)
    if dx is not None:
        launch, settings = _dx_launch(
            columns,
            dy.element_size() + y.element_size(),
            weight is not None,
            bias is not None,
            weight_offset,
            centered,
            normalized,
            needs_weight,
            needs_bias,
        )
        if fused:
            tiles = -(-rows // settings.block_rows)
            stay = settings.programs_per_multiprocessor * multiprocessors(dy.device)
            grid = (min(tiles, stay) if stay else tiles, 1, 1)
            if wanted:
                programs = grid[0]
                sums = _partial_sums(dy, len(wanted), programs)
            launch(grid, (*tensors, dx, sums), (rows, tiles), strides)
        else:
            launch((rows, 1, 1), (*tensors, dx), (rows,), strides)
    if wanted:
        grid = (-(-columns // TOTAL_COLUMNS), len(wanted), 1)
        total_launch(columns)(grid, (sums, wanted[0], wanted[-1]), (programs,))
    return dx, d_weight, d_bias


def _partial_sums(like: Tensor, vectors: int, programs: int) -> Tensor:
    return like.new_empty(vectors, programs, like.shape[-1], dtype=torch.float32)
