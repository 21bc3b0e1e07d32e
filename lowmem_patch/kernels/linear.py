"""A Linear's low-rank adapter, cast and padded; the gradients of its weight and of a scale of its outputs.

`adapter_weights`: A' [R, F] holds A and rows of zeros behind it, B' [O, R] holds B and columns of zeros:
(x A'^T) B'^T is x A^T B^T. Tensor cores read 16 bytes at a time, so a product over another rank than a
multiple of 8 runs in slower kernels.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import padded_rank
from lowmem_patch.kernels._launch import Launch, launches

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["rank", "A_elements", "padded_A", "padded_B"])
def _adapter_kernel(
    A_ptr, B_ptr, A_out_ptr, B_out_ptr,
    rank, A_elements, padded_A, padded_B,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lora_A = tl.load(A_ptr + position, mask=position < A_elements, other=0.0)
    tl.store(A_out_ptr + position, lora_A.to(A_out_ptr.dtype.element_ty), mask=position < padded_A)
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


_SCALED_BLOCK, _SCALED_WARPS = 2048, 8


@triton.jit(do_not_specialize=["factor_step"])
def _scaled_gradients_kernel(
    product_ptr, weight_ptr, factor_ptr, gradient_ptr, sum_ptr,
    factor_step, columns,
    STORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row * factor_step).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        place = row * columns + column
        product = tl.load(product_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += product * tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if STORES:
            gradient = (product * factor).to(gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + place, gradient, mask=inside)
    tl.store(sum_ptr + row, tl.sum(total, axis=0))


@cache
def _scaled_launch(columns: int, stores: bool) -> Launch:
    block = min(_SCALED_BLOCK, triton.next_power_of_2(columns))
    return Launch(_scaled_gradients_kernel, _SCALED_WARPS, STORES=stores, BLOCK=block)


def scaled_gradients(
    products: Tensor, weight: Tensor, factors: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """``rowsum(products * weight)``, float32, and ``factors * products`` in ``dtype``."""
    rows, columns = products.shape
    sums = products.new_empty(rows, dtype=torch.float32)
    gradient = None if dtype is None else products.new_empty(products.shape, dtype=dtype)
    if not products.numel():
        return sums.zero_(), gradient
    products, weight, factors = (t.contiguous() for t in (products, weight, factors))
    # an absent gradient is never written; any pointer will do
    tensors = (products, weight, factors, products if gradient is None else gradient, sums)
    launch = _scaled_launch(columns, gradient is not None)
    launch((rows, 1, 1), tensors, (int(factors.numel() > 1),), (columns,))
    return sums, gradient
