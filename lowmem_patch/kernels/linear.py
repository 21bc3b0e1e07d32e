"""Both weights of a low-rank adapter in one launch: cast, and their rank padded with zeros.

A' [R, F] holds A and rows of zeros behind it, B' [O, R] holds B and columns of zeros: (x A'^T) B'^T is
x A^T B^T. Tensor cores read 16 bytes at a time, so a product over another rank than a multiple of 8
runs in slower kernels.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import padded_rank
from lowmem_patch.kernels._launch import launches

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["rank", "A_elements", "padded_A", "padded_B"])
def _adapter_kernel(
    A_ptr,
    B_ptr,
    A_out_ptr,
    B_out_ptr,
    rank,
    A_elements,
    padded_A,
    padded_B,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lora_A = tl.load(A_ptr + position, mask=position < A_elements, other=0.0)
    tl.store(
        A_out_ptr + position,
        lora_A.to(A_out_ptr.dtype.element_ty),
        mask=position < padded_A,
    )
    row, column = position // RANK, position % RANK
    inside = position < padded_B
    lora_B = tl.load(B_ptr + row * rank + column, mask=inside & (column < rank), other=0.0)
    tl.store(B_out_ptr + position, lora_B.to(B_out_ptr.dtype.element_ty), mask=inside)


_adapter_launch = launches(_adapter_kernel, NUM_WARPS, BLOCK)


def adapter_weights(lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[r, F]`` and ``[O, r]`` as ``[R, F]`` and ``[O, R]`` in ``dtype``, R as `padded_rank` says."""
    rank, features, outputs = lora_A.shape[0], lora_A.shape[1], lora_B.shape[0]
    padded = padded_rank(rank, dtype)
    if padded == rank and lora_A.dtype == lora_B.dtype == dtype:
        return lora_A, lora_B
    lora_A, lora_B = lora_A.contiguous(), lora_B.contiguous()
    padded_A = lora_A.new_empty((padded, features), dtype=dtype)
    padded_B = lora_B.new_empty((outputs, padded), dtype=dtype)
    sizes = (padded * features, outputs * padded)
    if all(sizes):
        grid = (-(-max(sizes) // BLOCK), 1, 1)
        _adapter_launch(padded)(
            grid, (lora_A, lora_B, padded_A, padded_B), (rank, rank * features, *sizes)
        )
    return padded_A, padded_B
