"""Activation with one to four bits per element saved for backward, and the backward from those bits.

h~(x) = sum a_i relu(x - c_i) stands in for h in backward (arXiv 2406.16282, section 4):
dx = dy h~'(x), and h~'(x) = level[code] with code = number of thresholds below x.

Saved: the codes. Eight elements are one 16-byte load of a half tensor, so a thread packs the codes of
eight into one group of whole words: one of 8, 16 or 32 bits for 1, 2 or 4 bits a code. For 3 bits these
are 24 bits: a word of 16 with the two lower bits of each code, in the first two thirds of the memory, and a
byte of the highest ones in the last third. So no bit is wasted, no two threads share a word, and each plane
is read and written as one vector. Ten codes in an int32 would take 3.2 bits and loads that no vector fits.
Element i has the bits from i * bits of its word; only the last group is padded (with zeros).
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import CODES_PER_GROUP, STEP_TABLES, ActivationKind, codes_bytes
from lowmem_patch.kernels import _math
from lowmem_patch.kernels._launch import Launch, empty

__all__ = ["codes_backward", "codes_forward"]

BLOCK_GROUPS = 256
NUM_WARPS = 4
GROUP = tl.constexpr(CODES_PER_GROUP)
MOST_LEVELS = 16


@triton.jit
def _tile(elements, groups, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Groups, offsets of their elements ``[BLOCK, 8]``, and which of these exist."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EVEN:
        # one condition for a whole group, so that the access stays one vector
        mask = tl.broadcast_to((group < groups)[:, None], offsets.shape)
    else:
        mask = offsets < elements
    return group, offsets, mask


@triton.jit
def _unit(mask, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """1 at each element's place in its group's word; 0 where there is no element."""
    unit = tl.broadcast_to((1 << (WIDTH * tl.arange(0, GROUP)))[None, :], mask.shape)
    if EVEN:
        return unit  # the word of no group is never written
    else:
        return tl.where(mask, unit, 0)


@triton.jit
def _words(codes_ptr, WIDTH: tl.constexpr):
    """The plane of codes of WIDTH bits, by groups."""
    if WIDTH == 1:
        return codes_ptr
    elif WIDTH == 2:
        return codes_ptr.to(tl.pointer_type(tl.int16))
    else:
        return codes_ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def _store_plane(codes_ptr, group, groups, places, WIDTH: tl.constexpr):
    """Store the sums of what each element has at its place ``[BLOCK, 8]``."""
    words = _words(codes_ptr, WIDTH) + group
    packed = tl.sum(places, axis=1)
    tl.store(words, packed.to(words.dtype.element_ty), mask=group < groups)


@triton.jit
def _load_plane(codes_ptr, group, groups, WIDTH: tl.constexpr):
    packed = tl.load(_words(codes_ptr, WIDTH) + group, mask=group < groups, other=0)
    return packed.to(tl.int32)[:, None]


@triton.jit
def _is_set(packed, BIT: tl.constexpr, WIDTH: tl.constexpr):
    """Whether a bit of each element's code is 1."""
    return (packed & (1 << (WIDTH * tl.arange(0, GROUP) + BIT))[None, :]) != 0


# Codes and levels are found by halving: with 4 bits, 4 comparisons and 11 selections for 15 comparisons. Each
# bit goes to its place in the word at once, and is tested there: no code is put together or taken apart.
@triton.jit
def _places_of(
    x, unit, high_unit,
    C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr,
    C6: tl.constexpr, C7: tl.constexpr, C8: tl.constexpr, C9: tl.constexpr, C10: tl.constexpr,
    C11: tl.constexpr, C12: tl.constexpr, C13: tl.constexpr, C14: tl.constexpr, C15: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """How many of the 2^BITS - 1 thresholds lie below x, in units of each plane."""
    high = tl.zeros_like(unit)
    if BITS == 1:
        low = tl.where(x > C1, unit, 0)
    elif BITS == 2:
        low = tl.where(x > C1, unit, 0) + tl.where(x > C2, unit, 0) + tl.where(x > C3, unit, 0)
    elif BITS == 3:
        b2 = x > C4
        b1 = x > tl.where(b2, C6, C2)
        b0 = x > tl.where(b2, tl.where(b1, C7, C5), tl.where(b1, C3, C1))
        low = tl.where(b1, 2 * unit, 0) + tl.where(b0, unit, 0)
        high = tl.where(b2, high_unit, 0)
    else:
        b3 = x > C8
        b2 = x > tl.where(b3, C12, C4)
        b1 = x > tl.where(b3, tl.where(b2, C14, C10), tl.where(b2, C6, C2))
        below = tl.where(b2, tl.where(b1, C7, C5), tl.where(b1, C3, C1))
        above = tl.where(b2, tl.where(b1, C15, C13), tl.where(b1, C11, C9))
        b0 = x > tl.where(b3, above, below)
        low = tl.where(b3, 8 * unit, 0) + tl.where(b2, 4 * unit, 0)
        low += tl.where(b1, 2 * unit, 0) + tl.where(b0, unit, 0)
    return low, high


@triton.jit
def _one_of_four(two, one, L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr):
    return tl.where(two, tl.where(one, L3, L2), tl.where(one, L1, L0))


@triton.jit
def _level_of(
    packed, high_packed,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr,
    L4: tl.constexpr, L5: tl.constexpr, L6: tl.constexpr, L7: tl.constexpr,
    L8: tl.constexpr, L9: tl.constexpr, L10: tl.constexpr, L11: tl.constexpr,
    L12: tl.constexpr, L13: tl.constexpr, L14: tl.constexpr, L15: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    one = _is_set(packed, 0, WIDTH)
    if BITS == 1:
        return tl.where(one, L1, L0)
    else:
        two = _is_set(packed, 1, WIDTH)
        level = _one_of_four(two, one, L0, L1, L2, L3)
        if BITS == 3:
            four = _is_set(high_packed, 0, 1)
            level = tl.where(four, _one_of_four(two, one, L4, L5, L6, L7), level)
        elif BITS == 4:
            four, eight = _is_set(packed, 2, WIDTH), _is_set(packed, 3, WIDTH)
            level = tl.where(four, _one_of_four(two, one, L4, L5, L6, L7), level)
            low = _one_of_four(two, one, L8, L9, L10, L11)
            high = _one_of_four(two, one, L12, L13, L14, L15)
            level = tl.where(eight, tl.where(four, high, low), level)
        return level


@triton.jit(do_not_specialize=["elements", "groups"])
def _codes_forward_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    elements,
    groups,
    C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr,
    C6: tl.constexpr, C7: tl.constexpr, C8: tl.constexpr, C9: tl.constexpr, C10: tl.constexpr,
    C11: tl.constexpr, C12: tl.constexpr, C13: tl.constexpr, C14: tl.constexpr, C15: tl.constexpr,
    LAST: tl.constexpr, CYCLIC: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, PRECISE: tl.constexpr, COARSE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, offsets, mask = _tile(elements, groups, EVEN, BLOCK)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = _math.activate(x, KIND, PRECISE, COARSE)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    low, high = _places_of(
        x, _unit(mask, WIDTH, EVEN), _unit(mask, 1, EVEN),
        C1, C2, C3, C4, C5, C6, C7, C8, C9, C10, C11, C12, C13, C14, C15, BITS,
    )  # fmt: skip
    if CYCLIC:
        low, high = tl.where(x >= LAST, 0, low), tl.where(x >= LAST, 0, high)
    _store_plane(codes_ptr, group, groups, low, WIDTH)
    if BITS == 3:
        _store_plane(codes_ptr + 2 * groups.to(tl.int64), group, groups, high, 1)


@triton.jit(do_not_specialize=["elements", "groups"])
def _codes_backward_kernel(
    dy_ptr,
    codes_ptr,
    dx_ptr,
    elements,
    groups,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr,
    L4: tl.constexpr, L5: tl.constexpr, L6: tl.constexpr, L7: tl.constexpr,
    L8: tl.constexpr, L9: tl.constexpr, L10: tl.constexpr, L11: tl.constexpr,
    L12: tl.constexpr, L13: tl.constexpr, L14: tl.constexpr, L15: tl.constexpr,
    BITS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, offsets, mask = _tile(elements, groups, EVEN, BLOCK)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    packed = _load_plane(codes_ptr, group, groups, 2 if BITS == 3 else BITS)
    high_packed = packed
    if BITS == 3:
        high_packed = _load_plane(codes_ptr + 2 * groups.to(tl.int64), group, groups, 1)
    slope = _level_of(
        packed, high_packed,
        L0, L1, L2, L3, L4, L5, L6, L7, L8, L9, L10, L11, L12, L13, L14, L15, BITS,
    )  # fmt: skip
    tl.store(dx_ptr + offsets, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)


@cache
def _forward_launch(kind: ActivationKind, bits: int, dtype: torch.dtype, even: bool) -> Launch:
    table = STEP_TABLES[kind][bits]
    inner = table.thresholds[: len(table.levels) - 1]
    thresholds = (*inner, *(0.0,) * (MOST_LEVELS - 1 - len(inner)))
    constants: dict[str, Any] = {f"C{number}": value for number, value in enumerate(thresholds, 1)}
    return Launch(
        _codes_forward_kernel,
        NUM_WARPS,
        **constants,
        LAST=table.thresholds[-1],
        CYCLIC=table.cyclic,
        BITS=table.bits,
        KIND=kind,
        PRECISE=dtype == torch.float32,
        COARSE=dtype == torch.bfloat16,
        EVEN=even,
        BLOCK=BLOCK_GROUPS,
    )


@cache
def _backward_launch(kind: ActivationKind, bits: int, even: bool) -> Launch:
    table = STEP_TABLES[kind][bits]
    levels = (*table.levels, *(0.0,) * (MOST_LEVELS - len(table.levels)))
    constants: dict[str, Any] = {f"L{number}": value for number, value in enumerate(levels)}
    return Launch(
        _codes_backward_kernel,
        NUM_WARPS,
        **constants,
        BITS=table.bits,
        EVEN=even,
        BLOCK=BLOCK_GROUPS,
    )


def codes_forward(x: Tensor, kind: ActivationKind, bits: int) -> tuple[Tensor, Tensor]:
    """y = h(x), contiguous, and codes ``[codes_bytes(n, table.bits)]`` uint8."""
    x = x.contiguous()
    y = torch.empty_like(x)
    elements = x.numel()
    codes = x.new_empty(codes_bytes(elements, STEP_TABLES[kind][bits].bits), dtype=torch.uint8)
    if elements == 0:
        return y, codes
    groups = -(-elements // CODES_PER_GROUP)
    launch = _forward_launch(kind, bits, x.dtype, elements % CODES_PER_GROUP == 0)
    launch((-(-groups // BLOCK_GROUPS), 1, 1), (x, y, codes), (elements, groups))
    return y, codes


def codes_backward(
    dy: Tensor, codes: Tensor, kind: ActivationKind, bits: int, dtype: torch.dtype
) -> Tensor:
    """dx = dy * level[code], shape of ``dy``, contiguous, in ``dtype``."""
    dy = dy.contiguous()
    dx = empty(dy, dtype)
    elements = dy.numel()
    if elements == 0:
        return dx
    groups = -(-elements // CODES_PER_GROUP)
    launch = _backward_launch(kind, bits, elements % CODES_PER_GROUP == 0)
    launch((-(-groups // BLOCK_GROUPS), 1, 1), (dy, codes, dx), (elements, groups))
    return dx
