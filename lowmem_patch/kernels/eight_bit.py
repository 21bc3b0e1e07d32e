"""8-bit storage: one pass that makes integers and scales, one that makes values of them again.

A program holds whole groups, so that the largest value of each is found in registers and memory is read once.
A kernel whose programs write whole groups stores them by itself (`store_groups`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import EIGHT_BIT_GROUP, EIGHT_BIT_LEVELS
from lowmem_patch.kernels import _math
from lowmem_patch.kernels._launch import Launch, launches

BLOCK_GROUPS = 32
NUM_WARPS = 4
GROUP = tl.constexpr(EIGHT_BIT_GROUP)
LEVELS = tl.constexpr(float(EIGHT_BIT_LEVELS))
STEP = tl.constexpr(1 / EIGHT_BIT_LEVELS)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# adding it to a float32 below 2^22 rounds that to the nearest integer, of two to the even one
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def group_tile(elements, groups, GROUP: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """The program's groups, offsets of their elements ``[BLOCK, GROUP]``, and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EVEN:
        # one condition for a whole group, so that the access stays one vector
        mask = tl.broadcast_to((group < groups)[:, None], offsets.shape)
    else:
        mask = offsets < elements
    return group, offsets, mask


@triton.jit
def _in_eight_bits(x):
    """Integers ``[G, GROUP]`` int8 and scales ``[G]`` of groups in float32."""
    largest = tl.max(tl.abs(x), axis=1)
    # up to what bfloat16 holds, whose 16 bits are the upper ones of a float32
    bits = (largest * STEP).to(tl.int32, bitcast=True)
    wide = ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    wide = tl.where(wide < TINY, 0.0, wide)
    if _math.NVIDIA:
        # 0 times what is not finite is NaN, which a maximum may pass over
        zero = tl.sum(x * 0.0, axis=1)
        strange = zero != zero
    else:
        finite = tl.abs(x) < float("inf")
        strange = tl.sum(tl.where(finite, 0, 1), axis=1) > 0
        x = tl.where(finite, x, 0.0)
    # where the scale is 0, so are the integers
    divisor = tl.where(wide == 0.0, float("inf"), wide)
    inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), divisor)
    scaled = tl.where(strange[:, None], 0.0, _math.product(x, inverse[:, None]))
    # the lowest bits of the sum are those of the integer; a conversion takes twice the time
    integers = (scaled + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    return integers, tl.where(strange, float("nan"), wide).to(tl.bfloat16)


@triton.jit(do_not_specialize=["elements", "groups"])
def _to_kernel(
    x_ptr, integers_ptr, scales_ptr, elements, groups, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    group, offsets, mask = group_tile(elements, groups, GROUP, EVEN, BLOCK)
    integers, scale = _in_eight_bits(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32))
    tl.store(integers_ptr + offsets, integers, mask=mask)
    tl.store(scales_ptr + group, scale, mask=group < groups)


@triton.jit
def store_groups(x_ptr, integers_ptr, scales_ptr, first, end, BLOCK: tl.constexpr):
    """Groups ``first`` to ``end``, at most BLOCK, of what this program has just written to ``x_ptr``.

    They are read from the cache. In registers the tile of who computed it would have to change its shape,
    and with the layout that the compiler then gives it its sums would be rounded in another order.
    """
    tl.debug_barrier()
    group = first + tl.arange(0, BLOCK)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = tl.broadcast_to((group < end)[:, None], offsets.shape)
    integers, scale = _in_eight_bits(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32))
    tl.store(integers_ptr + offsets, integers, mask=mask)
    tl.store(scales_ptr + group, scale, mask=group < end)


@triton.jit
def values_of(integers, scale, LARGEST: tl.constexpr):
    """In float32, of integers in float32."""
    # the scale was rounded up, so that 127 of it may lie above the largest number; NaN stays NaN
    return tl.clamp(integers * scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["elements", "groups"])
def _from_kernel(
    integers_ptr, scales_ptr, y_ptr,
    elements, groups,
    LARGEST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, offsets, mask = group_tile(elements, groups, GROUP, EVEN, BLOCK)
    integers = tl.load(integers_ptr + offsets, mask=mask, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + group, mask=group < groups, other=0.0).to(tl.float32)
    y = values_of(integers, scale[:, None], LARGEST)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


# an AMD GPU's fused multiplication and addition would round other values up than the reference does
_to_launch = launches(_to_kernel, NUM_WARPS, BLOCK_GROUPS, fuse=False)


@cache
def _from_launch(even: bool, dtype: torch.dtype) -> Launch:
    largest = torch.finfo(dtype).max
    return Launch(_from_kernel, NUM_WARPS, LARGEST=largest, EVEN=even, BLOCK=BLOCK_GROUPS)


def to_eight_bits(x: Tensor, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """``[n]`` -> integers ``[n]`` int8 and scales ``[ceil(n / group)]`` bfloat16, written to ``into``."""
    elements = x.numel()
    integers, scales = empty_parts(x) if into is None else into
    if elements:
        groups = scales.numel()
        launch = _to_launch(elements % EIGHT_BIT_GROUP == 0)
        launch(_grid(groups), (x, integers, scales), (elements, groups))
    return integers, scales


def empty_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the results of `to_eight_bits`, of a tensor with as many elements as ``x``."""
    elements = x.numel()
    integers = x.new_empty(elements, dtype=torch.int8)
    return integers, x.new_empty(-(-elements // EIGHT_BIT_GROUP), dtype=torch.bfloat16)


def from_eight_bits(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``[n]`` in ``dtype``, of the results of `to_eight_bits`."""
    elements = integers.numel()
    y = torch.empty_like(integers, dtype=dtype)
    if elements:
        launch = _from_launch(elements % EIGHT_BIT_GROUP == 0, dtype)
        launch(_grid(scales.numel()), (integers, scales, y), (elements, scales.numel()))
    return y


def _grid(groups: int) -> tuple[int, int, int]:
    return (-(-groups // BLOCK_GROUPS), 1, 1)
