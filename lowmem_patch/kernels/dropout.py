"""Dropout from bits: flags packed eight a byte, and a tensor times them.

y = x scale where the element's bit is 1, x 0 elsewhere (so that NaN stays NaN, as in torch).
Element 8 b + i has bit i of byte b; only the last byte is padded (with zeros). Eight elements are one
16-byte load of a half tensor, so a byte is packed and unpacked inside one thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import empty, launches
from lowmem_patch.kernels.eight_bit import group_tile

BLOCK_BYTES = 256
NUM_WARPS = 4
_ROUNDS = {torch.float32: "", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """x, which is float32, as a tensor of that dtype would hold it."""
    if DTYPE == "fp16":
        x = x.to(tl.float16).to(tl.float32)
    if DTYPE == "bf16":
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["elements", "count"])
def _pack_kernel(flags_ptr, bits_ptr, elements, count, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    byte, offsets, mask = group_tile(elements, count, 8, EVEN, BLOCK)
    flag = tl.load(flags_ptr + offsets, mask=mask, other=0).to(tl.int32)
    packed = tl.sum(flag << tl.arange(0, 8)[None, :], axis=1)
    tl.store(bits_ptr + byte, packed.to(tl.uint8), mask=byte < count)


@triton.jit(do_not_specialize=["elements", "count", "scale"])
def _drop_kernel(
    x_ptr, bits_ptr, y_ptr,
    elements, count, scale,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    byte, offsets, mask = group_tile(elements, count, 8, EVEN, BLOCK)
    x = _round(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32), DTYPE)
    packed = tl.load(bits_ptr + byte, mask=byte < count, other=0).to(tl.int32)
    factor = tl.where((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1 == 1, scale, 0.0)
    y = _round(x * factor, DTYPE)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


_pack_launch = launches(_pack_kernel, NUM_WARPS, BLOCK_BYTES)
_drop_launch = launches(_drop_kernel, NUM_WARPS, BLOCK_BYTES)


def pack_bool(mask: Tensor) -> Tensor:
    """Eight flags a byte, first flag lowest: ``[ceil(n / 8)]`` uint8."""
    flags = mask.contiguous().view(torch.uint8)
    elements = flags.numel()
    count = -(-elements // 8)
    bits = flags.new_empty(count)
    if elements:
        grid = (-(-count // BLOCK_BYTES), 1, 1)
        _pack_launch(elements % 8 == 0)(grid, (flags, bits), (elements, count))
    return bits


def drop(
    x: Tensor, bits: Tensor, scale: float, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """As of the reference."""
    x = x.contiguous()
    y = empty(x, out_dtype)
    elements, count = x.numel(), bits.numel()
    if elements:
        grid = (-(-count // BLOCK_BYTES), 1, 1)
        _drop_launch(_ROUNDS[dtype], elements % 8 == 0)(
            grid, (x, bits, y), (elements, count, scale)
        )
    return y
