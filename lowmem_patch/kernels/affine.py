"""y = z gamma + bias over the last dimension, one pass."""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import NormSettings
from lowmem_patch.kernels._launch import Launch, contiguous, empty
from lowmem_patch.kernels.norms import affine_constants, load_vector

TILE = 4096  # elements of a program
NUM_WARPS = 8


@triton.jit(do_not_specialize=["rows"])
def _affine_kernel(
    z_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    columns,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def _launcher(
    columns: int, has_weight: bool, has_bias: bool, settings: NormSettings
) -> tuple[Launch, int, int]:
    """The launch for rows of this length; rows and columns of a program."""
    block = min(triton.next_power_of_2(columns), TILE)
    constants: dict[str, Any] = {
        **affine_constants(has_weight, has_bias, settings),
        "BLOCK_ROWS": TILE // block,
        "BLOCK": block,
    }
    launch = Launch(_affine_kernel, NUM_WARPS, **constants)
    return launch, TILE // block, block


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
    launch, block_rows, block = _launcher(columns, weight is not None, bias is not None, settings)
    grid = (-(-rows // block_rows), -(-columns // block), 1)
    # an absent vector is never read; any pointer will do
    tensors = (z, y, z if weight is None else weight, z if bias is None else bias)
    launch(grid, tensors, (rows,), (columns,))
    return y
