"""The gradients of a Linear's weight and of a scale of its outputs, from one product, in one pass."""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import Launch

BLOCK = 2048
NUM_WARPS = 8


@triton.jit(do_not_specialize=["factor_step"])
def _scaled_gradients_kernel(
    product_ptr,
    weight_ptr,
    factor_ptr,
    gradient_ptr,
    sum_ptr,
    factor_step,
    columns,
    STORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def _launch(columns: int, stores: bool) -> Launch:
    block = min(BLOCK, triton.next_power_of_2(columns))
    return Launch(_scaled_gradients_kernel, NUM_WARPS, STORES=stores, BLOCK=block)


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
    launch = _launch(columns, gradient is not None)
    launch((rows, 1, 1), tensors, (int(factors.numel() > 1),), (columns,))
    return sums, gradient
