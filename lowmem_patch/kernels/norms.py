"""LayerNorm and RMSNorm forward: one pass over rows that fit registers, three over longer ones; and affines.

z = (x - mean) rstd, y = z gamma + bias; RMSNorm subtracts no mean. Saved: y, or z where it is asked for, and
rstd; see `lowmem_patch.kernels.norms_backward`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import EIGHT_BIT_GROUP, NormSettings
from lowmem_patch.kernels._launch import (
    FORWARD_COLUMNS,
    Launch,
    as_rows,
    contiguous,
    empty,
    forward_tiles,
)
from lowmem_patch.kernels.eight_bit import GROUP, empty_parts, store_groups, to_eight_bits


def affine_constants(has_weight: bool, has_bias: bool, settings: NormSettings) -> dict[str, Any]:
    """What the kernels are told of gamma and beta, in the order of their arguments."""
    return {"HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias, "OFFSET": settings.weight_offset}


@triton.jit
def load_vector(pointer, column, mask, PRESENT: tl.constexpr, OTHER: tl.constexpr):
    if PRESENT:
        return tl.load(pointer + column, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.full(column.shape, OTHER, tl.float32)


@triton.jit
def scales(
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


@triton.jit
def tile_mask(row, rows, inside, BLOCK_ROWS: tl.constexpr):
    """``inside``, the columns that exist, of the rows that exist."""
    if BLOCK_ROWS > 1:
        return (row < rows)[:, None] & inside[None, :]
    else:
        return inside[None, :]


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_kernel(
    x_ptr, y_ptr, rstd_ptr, z_ptr, copy_ptr, weight_ptr, bias_ptr, integers_ptr, scales_ptr,
    rows, eps, x_stride,
    COLUMNS: tl.constexpr, STORES_Z: tl.constexpr, STORES_COPY: tl.constexpr,
    IN_EIGHT_BITS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr, CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    mask = tile_mask(row, rows, inside, BLOCK_ROWS)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) * (1.0 / COLUMNS)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / COLUMNS) + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd[:, None]
    if STORES_Z:
        z_row = z_ptr + row[:, None] * COLUMNS + column[None, :]
        tl.store(z_row, y.to(z_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        gamma = load_vector(weight_ptr, column, inside, True, 1.0) + OFFSET
        y *= gamma[None, :]
    if HAS_BIAS:
        y += load_vector(bias_ptr, column, inside, True, 0.0)[None, :]
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * COLUMNS + column[None, :], y, mask=mask)
    if STORES_COPY:
        copy_row = copy_ptr + row[:, None] * COLUMNS + column[None, :]
        tl.store(copy_row, y.to(copy_ptr.dtype.element_ty), mask=mask)
    if IN_EIGHT_BITS:
        saved_ptr = z_ptr if STORES_Z else (copy_ptr if STORES_COPY else y_ptr)
        GROUPS: tl.constexpr = COLUMNS // GROUP
        first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS * GROUPS
        end = tl.minimum(first + BLOCK_ROWS * GROUPS, rows.to(tl.int64) * GROUPS)
        store_groups(saved_ptr, integers_ptr, scales_ptr, first, end, BLOCK_ROWS * BLOCK // GROUP)


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_long_row_kernel(
    x_ptr, y_ptr, rstd_ptr, z_ptr, copy_ptr, weight_ptr, bias_ptr,
    rows, eps, x_stride,
    COLUMNS: tl.constexpr, STORES_Z: tl.constexpr, STORES_COPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * COLUMNS
    if STORES_Z:
        z_ptr += row * COLUMNS
    if STORES_COPY:
        copy_ptr += row * COLUMNS
    mean = 0.0
    if CENTERED:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total += tl.load(x_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        mean = tl.sum(total) * (1.0 / COLUMNS)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - mean, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares) * (1.0 / COLUMNS) + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if STORES_Z:
            tl.store(z_ptr + column, y.to(z_ptr.dtype.element_ty), mask=mask)
        if HAS_WEIGHT:
            y *= load_vector(weight_ptr, column, mask, True, 1.0) + OFFSET
        if HAS_BIAS:
            y += load_vector(bias_ptr, column, mask, True, 0.0)
        rounded = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + column, rounded, mask=mask)
        if STORES_COPY:
            tl.store(copy_ptr + column, rounded.to(copy_ptr.dtype.element_ty), mask=mask)


@cache
def _launcher(
    columns: int,
    stores_z: bool,
    stores_copy: bool,
    in_eight_bits: bool,
    has_weight: bool,
    has_bias: bool,
    settings: NormSettings,
) -> tuple[Any, int]:
    """The launch for rows of this length, and the rows of a program."""
    tiles = forward_tiles(columns)
    looped = columns > FORWARD_COLUMNS
    constants: dict[str, Any] = {
        "COLUMNS": columns,
        "STORES_Z": stores_z,
        "STORES_COPY": stores_copy,
        **({} if looped else {"IN_EIGHT_BITS": in_eight_bits}),
        **affine_constants(has_weight, has_bias, settings),
        "CENTERED": settings.centered,
        **({} if looped else {"BLOCK_ROWS": tiles.block_rows}),
        "BLOCK": tiles.block_columns,
    }
    kernel = _forward_long_row_kernel if looped else _forward_kernel
    return Launch(kernel, tiles.num_warps, **constants), tiles.block_rows


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
    z_dtype: torch.dtype | None = None,
    parts: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y ``[..., N]`` in ``out_dtype``, a copy of it in ``copy_dtype`` where given, z like y in ``z_dtype``
    where given, and rstd ``[...]`` in float32.

    ``parts``: memory for the integers and scales of z, else of the copy, else of y, where `_stores_parts`.
    """
    shape = x.shape
    y, rstd = empty(x, out_dtype), x.new_empty(shape[:-1], dtype=torch.float32)
    z = None if z_dtype is None else empty(x, z_dtype)
    copy = None if copy_dtype is None else empty(x, copy_dtype)
    columns, rows = shape[-1], rstd.numel()
    if rows == 0 or columns == 0:
        return y, copy, z, rstd.fill_(settings.eps).rsqrt_() if columns == 0 else rstd
    x, x_stride = as_rows(x)
    weight, bias = contiguous(weight), contiguous(bias)
    vectors = weight is not None, bias is not None
    launch, block_rows = _launcher(
        columns, z is not None, copy is not None, parts is not None, *vectors, settings
    )
    # what is absent is never read or written; any pointer will do
    tensors = [
        x,
        y,
        rstd,
        y if z is None else z,
        y if copy is None else copy,
        x if weight is None else weight,
        x if bias is None else bias,
    ]
    if columns <= FORWARD_COLUMNS:
        tensors += (y, y) if parts is None else parts
    launch((-(-rows // block_rows), 1, 1), tensors, (rows, float(settings.eps)), (x_stride,))
    return y, copy, z, rstd


def _stores_parts(columns: int) -> bool:
    """Whether a program writes whole groups, and rounds their integers as `to_eight_bits` does."""
    if torch.version.hip is not None or columns > FORWARD_COLUMNS:
        return False
    # the compiler lays out rows of one group as groups, and rounds their sums in another order
    return columns % EIGHT_BIT_GROUP == 0 and columns > EIGHT_BIT_GROUP


def norm_forward_in_eight_bits(
    x: Tensor, *rest: Any
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None, Tensor], tuple[Tensor, Tensor]]:
    """`norm_forward`, and the integers and scales of its z, else of the copy, else of y."""
    parts = empty_parts(x) if _stores_parts(x.shape[-1]) else None
    forward: Any = partial(norm_forward, parts=parts)
    y, copy, z, rstd = forward(x, *rest)
    if parts is None:
        saved = z if z is not None else copy if copy is not None else y
        parts = to_eight_bits(saved.view(-1))
    return (y, copy, z, rstd), parts


_AFFINE_TILE = 4096  # elements of a program
_AFFINE_WARPS = 8


@triton.jit(do_not_specialize=["rows"])
def _affine_kernel(
    z_ptr, y_ptr, weight_ptr, bias_ptr,
    rows, columns,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * columns + column[None, :]
    y = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        y *= (load_vector(weight_ptr, column, inside, True, 1.0) + OFFSET)[None, :]
    if HAS_BIAS:
        y += load_vector(bias_ptr, column, inside, True, 0.0)[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@cache
def _affine_launcher(
    columns: int, has_weight: bool, has_bias: bool, settings: NormSettings
) -> tuple[Launch, int, int]:
    """The launch for rows of this length; rows and columns of a program."""
    block = min(triton.next_power_of_2(columns), _AFFINE_TILE)
    constants: dict[str, Any] = {
        **affine_constants(has_weight, has_bias, settings),
        "BLOCK_ROWS": _AFFINE_TILE // block,
        "BLOCK": block,
    }
    launch = Launch(_affine_kernel, _AFFINE_WARPS, **constants)
    return launch, _AFFINE_TILE // block, block


def affine(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    dtype: torch.dtype,
) -> Tensor:
    """``[..., N]`` in ``dtype``, contiguous."""
    y = empty(z, dtype)
    if not y.numel():
        return y
    columns = z.shape[-1]
    rows = y.numel() // columns
    z, weight, bias = z.contiguous(), contiguous(weight), contiguous(bias)
    launch, block_rows, block = _affine_launcher(
        columns, weight is not None, bias is not None, settings
    )
    grid = (-(-rows // block_rows), -(-columns // block), 1)
    # an absent vector is never read; any pointer will do
    tensors = (z, y, z if weight is None else weight, z if bias is None else bias)
    launch(grid, tensors, (rows,), (columns,))
    return y
