"""LayerNorm and RMSNorm backward from the output: x is not needed.

With u = y - bias, z = u / gamma (0 where gamma is 0), g = dy gamma and means over a row:
d(x - mean) = rstd (g - z mean(g z)), since z's own mean square is 1 up to eps. g z = dy u needs no
division, so
    dx = rstd (g - mean(g) - z mean(dy u)),    since mean(z) = 0; RMSNorm has no mean(g).
    d_weight = (sum over rows of dy u) / gamma,    d_bias = sum over rows of dy.
Saved: y, rstd, weight, bias. Where z was saved instead (NORMALIZED), nothing is divided:
    dx = rstd (g - mean(g) - z mean(g z)),    d_weight = sum over rows of dy z.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import NormSettings
from lowmem_patch.kernels._launch import (
    BACKWARD_COLUMNS,
    Launch,
    NormTiles,
    as_rows,
    backward_tiles,
    contiguous,
    empty,
    multiprocessors,
)
from lowmem_patch.kernels.norms import affine_constants, load_vector, scales, tile_mask
from lowmem_patch.kernels.norms_sums import (
    BackwardCase,
    partial_sums,
    store_sums,
    sum_columns,
    sum_partial,
)


@triton.jit
def _without_bias(y, bias, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, RELOAD: tl.constexpr):
    """u = y - bias."""
    if HAS_BIAS:
        if RELOAD:
            bias = load_vector(bias_ptr, column, inside, True, 0.0)
        y -= bias[None, :]
    return y


@triton.jit
def _tile_gradient(
    g, u, product, rstd, gamma, inverse, weight_ptr, column, inside,
    COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """dx of some rows, from dy in the place of g and dy u."""
    if not NORMALIZED:
        along_z = tl.sum(product, axis=1) * (1.0 / COLUMNS)
    if RELOAD:  # behind the first sum, so that fewer registers are in use during it
        gamma, inverse, _ = scales(
            weight_ptr, weight_ptr, column, inside, HAS_WEIGHT, False, OFFSET
        )
    if NORMALIZED:
        if HAS_WEIGHT:
            product *= gamma[None, :]
        along_z = tl.sum(product, axis=1) * (1.0 / COLUMNS)
    if HAS_WEIGHT:
        g *= gamma[None, :]
        if not NORMALIZED:
            u *= inverse[None, :]
    if CENTERED:
        g -= (tl.sum(g, axis=1) * (1.0 / COLUMNS))[:, None]
    return tl.fma(u, -along_z[:, None], g) * rstd[:, None]


# Compiled without contraction, which would round g once in its mean and not at all in g - mean(g): for
# rows that are (nearly) constant the difference is not 0, and rstd multiplies it.
@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    dy_ptr, y_ptr, rstd_ptr, weight_ptr, bias_ptr, dx_ptr, sums_ptr,
    rows, tiles, dy_stride, y_stride,
    COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    CENTERED: tl.constexpr, NORMALIZED: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr, RELOAD: tl.constexpr, STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    loads: tl.constexpr = not RELOAD
    gamma, inverse, bias = scales(
        weight_ptr, bias_ptr, column, inside, HAS_WEIGHT and loads, HAS_BIAS and loads, OFFSET
    )
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = tile_mask(row, rows, inside, BLOCK_ROWS)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0.0)
        y = tl.load(y_ptr + row[:, None] * y_stride + column[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        # columns and rows outside have dy = 0, so their u counts nowhere
        g = dy.to(tl.float32)
        u = _without_bias(y.to(tl.float32), bias, bias_ptr, column, inside, HAS_BIAS, RELOAD)
        product = g * u
        if NEEDS_WEIGHT:
            d_weight += tl.sum(product, axis=0)
        if NEEDS_BIAS:
            d_bias += tl.sum(g, axis=0)
        dx = _tile_gradient(
            g, u, product, rstd, gamma, inverse, weight_ptr, column, inside,
            COLUMNS, HAS_WEIGHT, OFFSET, CENTERED, NORMALIZED, RELOAD,
        )  # fmt: skip
        dx_row = dx_ptr + row[:, None] * COLUMNS + column[None, :]
        tl.store(dx_row, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT and RELOAD:
        _, inverse, _ = scales(weight_ptr, bias_ptr, column, inside, True, False, OFFSET)
    store_sums(
        sums_ptr, program, tl.num_programs(0), column, inside, d_weight, d_bias, inverse,
        COLUMNS, NORMALIZED, NEEDS_WEIGHT, NEEDS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _backward_long_row_kernel(
    dy_ptr, y_ptr, rstd_ptr, weight_ptr, bias_ptr, dx_ptr,
    rows, dy_stride, y_stride,
    COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    CENTERED: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def _dx_launch(case: BackwardCase, nbytes: int) -> tuple[Launch, NormTiles]:
    vectors, sums = case.has_weight + case.has_bias, case.needs_weight or case.needs_bias
    tiles = backward_tiles(case.columns, nbytes, vectors, sums)
    constants: dict[str, Any] = {
        "COLUMNS": case.columns,
        **affine_constants(case.has_weight, case.has_bias, case.settings),
        "CENTERED": case.settings.centered,
        "NORMALIZED": case.normalized,
    }
    kernel = _backward_long_row_kernel
    if case.columns <= BACKWARD_COLUMNS:
        kernel = _backward_kernel
        constants |= {
            "NEEDS_WEIGHT": case.needs_weight,
            "NEEDS_BIAS": case.needs_bias,
            "RELOAD": tiles.reload,
            "STAGES": tiles.num_stages,
            "BLOCK_ROWS": tiles.block_rows,
        }
    constants["BLOCK"] = tiles.block_columns
    return Launch(kernel, tiles.num_warps, fuse=False, **constants), tiles


def norm_backward(
    dy: Tensor,
    y: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    input_dtype: torch.dtype,
    needs: Sequence[bool],
    normalized: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As of the reference."""
    columns = dy.shape[-1]
    rows = dy.numel() // max(1, columns)
    dx = empty(dy, input_dtype) if needs[0] else None
    d_weight, d_bias = _gradient(weight, needs[1], rows), _gradient(bias, needs[2], rows)
    wanted = [vector for vector in (d_weight, d_bias) if vector is not None]
    if rows == 0:
        return dx, d_weight, d_bias
    dy, dy_stride = as_rows(dy)
    y, y_stride = (dy, dy_stride) if dx is None and d_weight is None else as_rows(y)
    weight, bias = contiguous(weight), None if normalized else contiguous(bias)
    case = BackwardCase(
        columns, weight is not None, bias is not None, settings,
        normalized, d_weight is not None, d_bias is not None,
    )  # fmt: skip
    # an absent vector is never read; any pointer will do
    tensors = (dy, y, rstd, dy if weight is None else weight, dy if bias is None else bias)
    strides = (dy_stride, y_stride)
    sums = None
    if wanted and (dx is None or columns > BACKWARD_COLUMNS):
        sums = sum_columns(case, (dy, y, *tensors[3:]), rows, strides)
    if dx is not None:
        sums = _launch_dx(case, tensors, dx, rows, strides, sums)
    if sums is not None:
        sum_partial(sums, wanted)
    return dx, d_weight, d_bias


def _gradient(vector: Tensor | None, needed: bool, rows: int) -> Tensor | None:
    """Memory for the gradient of weight or bias; of no rows it is 0."""
    if vector is None or not needed:
        return None
    return torch.empty_like(vector) if rows else torch.zeros_like(vector)


def _launch_dx(
    case: BackwardCase,
    tensors: tuple[Tensor, ...],
    dx: Tensor,
    rows: int,
    strides: tuple[int, int],
    sums: Tensor | None,
) -> Tensor | None:
    """Writes dx; returns the partial rows of d_weight and d_bias, made in the same pass if it can."""
    dy, y, *_ = tensors
    launch, tiles = _dx_launch(case, dy.element_size() + y.element_size())
    if case.columns > BACKWARD_COLUMNS:
        launch((rows, 1, 1), (*tensors, dx), (rows,), strides)
        return sums
    programs = count = -(-rows // tiles.block_rows)
    if tiles.programs_per_multiprocessor:
        stay = tiles.programs_per_multiprocessor * multiprocessors(dy.device)
        programs = min(count, stay)
    if case.needs_weight or case.needs_bias:
        sums = partial_sums(case, dy, programs)
    launch((programs, 1, 1), (*tensors, dx, dy if sums is None else sums), (rows, count), strides)
    return sums
