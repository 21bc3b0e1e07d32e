"""Both weights of a low-rank adapter in one launch: cast, and their rank padded with zeros.

A' [R, F] holds A and rows of zeros behind it, B' [O, R] holds B and columns of zeros: (x A'^T) B'^T is
x A^T B^T. Tensor cores read 16 bytes at a time, so a product over another rank than a multiple of 8
runs in slower kernels.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import padded_rank
from lowmem_patch.kernels._launch import Launch

__all__ = ["adapter_weights"]

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["rank", "down_elements", "padded_down", "padded_raised"])
def _adapter_kernel(
    down_ptr,
    raised_ptr,
    down_out_ptr,
    raised_out_ptr,
    rank,
    down_elements,
    padded_down,
    padded_raised,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    down = tl.load(down_ptr + position, mask=position < down_elements, other=0.0)
    tl.store(
        down_out_ptr + position,
        down.to(down_out_ptr.dtype.element_ty),
        mask=position < padded_down,
    )
    row, column = position // RANK, position % RANK
    inside = position < padded_raised
    raised = tl.load(raised_ptr + row * rank + column, mask=inside & (column < rank), other=0.0)
    tl.store(raised_out_ptr + position, raised.to(raised_out_ptr.dtype.element_ty), mask=inside)


@cache
def _adapter_launch(rank: int) -> Launch:
    return Launch(_adapter_kernel, NUM_WARPS, RANK=rank, BLOCK=BLOCK)


def adapter_weights(down: Tensor, raised: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A ``[r, F]`` and B ``[O, r]`` as ``[R, F]`` and ``[O, R]`` in ``dtype``, R as `padded_rank` says."""
    rank, features, outputs = down.shape[0], down.shape[1], raised.shape[0]
    padded = padded_rank(rank, dtype)
    if padded == rank and down.dtype == raised.dtype == dtype:
        return down, raised
    down, raised = down.contiguous(), raised.contiguous()
    wide_down = down.new_empty((padded, features), dtype=dtype)
    wide_raised = raised.new_empty((outputs, padded), dtype=dtype)
    sizes = (padded * features, outputs * padded)
    if all(sizes):
        grid = (-(-max(sizes) // BLOCK), 1, 1)
        _adapter_launch(padded)(
            grid, (down, raised, wide_down, wide_raised), (rank, rank * features, *sizes)
        )
    return wide_down, wide_raised
