"""y = z (weight + offset) + bias over the last dimension, one pass."""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import Launch, contiguous, empty
from lowmem_patch.kernels.norm import load_vector

__all__ = ["affine"]

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["elements"])
def _affine_kernel(
    z_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    elements,
    columns,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    column = (index % columns).to(tl.int32)
    y = tl.load(z_ptr + index, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        y *= load_vector(weight_ptr, column, mask, True, 1.0) + OFFSET
    if HAS_BIAS:
        y += load_vector(bias_ptr, column, mask, True, 0.0)
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=mask)


@cache
def _launch(has_weight: bool, has_bias: bool, offset: float) -> Launch:
    return Launch(
        _affine_kernel,
        NUM_WARPS,
        HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias,
        OFFSET=offset,
        BLOCK=BLOCK,
    )


def affine(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, dtype: torch.dtype
) -> Tensor:
    """``[..., N]`` in ``dtype``, contiguous."""
    y = empty(z, dtype)
    if not y.numel():
        return y
    z, weight, bias = z.contiguous(), contiguous(weight), contiguous(bias)
    # an absent vector is never read; any pointer will do
    tensors = (z, y, z if weight is None else weight, z if bias is None else bias)
    launch = _launch(weight is not None, bias is not None, offset)
    launch((-(-y.numel() // BLOCK), 1, 1), tensors, (y.numel(),), (z.shape[-1],))
    return y
