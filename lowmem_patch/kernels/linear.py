"""Both weights of a low-rank adapter in one launch: cast, and their rank padded with zeros.

A' [R, F] holds A and rows of zeros behind it, B' [O, R] holds B and columns of zeros: (x A'^T) B'^T is
x A^T B^T. Tensor cores read 16 bytes at a time, so a product over another rank than a multiple of 8
runs in slower kernels.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import padded_rank
from lowmem_patch.kernels._launch import Launch

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


@cache
def _adapter_launch(rank: int) -> Launch:
    return Launch(_adapter_kernel, NUM_WARPS, RANK=rank, BLOCK=BLOCK)


def adapter_weights(lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[r, F]`` and ``[O, r]`` as ``[R, F]`` and ``[O, R]`` in ``dtype``, R as `padded_rank` says."""
    rank, features = lora_A.shape
    padded = padded_rank(rank, dtype)
    if padded == rank and lora_A.dtype == lora_B.dtype == dtype:
        return lora_A, lora_B
    padded_A = lora_A.new_empty((padded, features), dtype=dtype)
    return padded_A, _write(lora_A, lora_B, padded_A)


def _write(lora_A: Tensor, lora_B: Tensor, padded_A: Tensor) -> Tensor:
    """Fills ``padded_A`` ``[R, F]``, and returns B ``[O, R]``."""
    rank, outputs, padded = lora_A.shape[0], lora_B.shape[0], padded_A.shape[0]
    lora_A, lora_B = lora_A.contiguous(), lora_B.contiguous()
    padded_B = lora_B.new_empty((outputs, padded), dtype=padded_A.dtype)
    sizes = (padded_A.numel(), padded_B.numel())
    if all(sizes):
        grid = (-(-max(sizes) // BLOCK), 1, 1)
        _adapter_launch(padded)(
            grid, (lora_A, lora_B, padded_A, padded_B), (rank, lora_A.numel(), *sizes)
        )
    return padded_B


def sibling_weights(
    lora_As: Sequence[Tensor | None], lora_Bs: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor | None, list[Tensor]]:
    """`adapter_weights` of several adapters of one input, ``[sum of R, F]`` and ``[O, R]`` each; None where
    the lora_A are None, which nobody reads then."""
    given = [lora_A for lora_A in lora_As if lora_A is not None]
    if not given:
        return None, [adapter_weights(B.new_empty((B.shape[1], 1)), B, dtype)[1] for B in lora_Bs]
    ranks = [padded_rank(B.shape[1], dtype) for B in lora_Bs]
    places = given[0].new_empty((sum(ranks), given[0].shape[1]), dtype=dtype)
    padded_Bs = []
    for lora_A, lora_B, place in zip(given, lora_Bs, places.split(ranks), strict=True):
        if len(place) == len(lora_A) and lora_A.dtype == lora_B.dtype == dtype:
            place.copy_(lora_A)
            padded_Bs.append(lora_B)
        else:
            padded_Bs.append(_write(lora_A, lora_B, place))
    return places, padded_Bs
