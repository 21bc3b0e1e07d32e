"""Activation with one to four bits per element saved for backward, and the backward from those bits.

h~(x) = sum a_i relu(x - c_i) stands in for h in backward (arXiv 2406.16282, section 4):
dx = dy h~'(x), and h~'(x) = level[code] with code = number of thresholds below x.

Saved: the codes. Eight elements are one 16-byte load of a half tensor, so a thread packs the codes of
eight into one group of whole words, which `lowmem_patch.reference.codes_forward` describes: no bit is
wasted, no two threads share a word, and each part is read and written as one vector. Ten codes in an int32
would take 3.2 bits and loads that no vector fits. Only the last group is padded (with zeros).

With 3 and 4 bits comparisons and selections would take longer than the memory traffic: on an H200 there is
time for 31 instructions an element, of which comparisons and selections count twice. So up to 7 thresholds
are compared with two half numbers at once, on GPUs that can, and else codes and levels are looked up
(`_bins`). Sums and words are made in float32, exactly, since they stay below 2^24: its additions and
multiplications take half the time of integers' shifts.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import CODES_PER_GROUP, STEP_TABLES, ActivationKind, codes_bytes
from lowmem_patch.kernels import _math
from lowmem_patch.kernels._bins import (
    Bins,
    above,
    bin_of,
    bins_of,
    can_be_joined,
    count_in_pairs,
    joined,
    joint_code,
    looked_up,
    pairs_program,
)
from lowmem_patch.kernels._launch import Launch, empty

NUM_WARPS = 4
GROUP = tl.constexpr(CODES_PER_GROUP)
MOST_LEVELS = tl.constexpr(16)


@triton.jit
def _tile(elements, groups, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """The program's first group, how many it has, offsets of their elements ``[BLOCK, 8]``, which exist.

    Offsets count from the program's first element, so that 32 bits hold them.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    own = tl.minimum(groups - first, BLOCK).to(tl.int32)
    group = tl.arange(0, BLOCK)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EVEN:
        # one condition for a whole group, so that the access stays one vector
        mask = tl.broadcast_to((group < own)[:, None], offsets.shape)
    else:
        mask = offsets < tl.minimum(elements - first * GROUP, BLOCK * GROUP).to(tl.int32)
    return first, own, offsets, mask


@triton.jit
def _halved(x, C: tl.constexpr, BITS: tl.constexpr):
    """How many of 7 or 15 thresholds C lie below x, found by halving."""
    if BITS == 3:
        b2 = x > C[3]
        b1 = x > tl.where(b2, C[5], C[1])
        b0 = x > tl.where(b2, tl.where(b1, C[6], C[4]), tl.where(b1, C[2], C[0]))
        high = tl.where(b2, 4, 0)
    else:
        b3 = x > C[7]
        b2 = x > tl.where(b3, C[11], C[3])
        b1 = x > tl.where(b3, tl.where(b2, C[13], C[9]), tl.where(b2, C[5], C[1]))
        below = tl.where(b2, tl.where(b1, C[6], C[4]), tl.where(b1, C[2], C[0]))
        above = tl.where(b2, tl.where(b1, C[14], C[12]), tl.where(b1, C[10], C[8]))
        b0 = x > tl.where(b3, above, below)
        high = tl.where(b3, 8, 0) + tl.where(b2, 4, 0)
    return high + tl.where(b1, 2, 0) + tl.where(b0, 1, 0)


@triton.jit
def _one_of_four(two, one, V: tl.constexpr, FIRST: tl.constexpr):
    high = tl.where(one, V[FIRST + 3], V[FIRST + 2])
    return tl.where(two, high, tl.where(one, V[FIRST + 1], V[FIRST]))


@triton.jit
def _value_of(code, V: tl.constexpr):
    """The value with the number ``code``, 0 to 15."""
    one, two = (code & 1) != 0, (code & 2) != 0
    four, eight = (code & 4) != 0, (code & 8) != 0
    first, second = _one_of_four(two, one, V, 0), _one_of_four(two, one, V, 4)
    third, fourth = _one_of_four(two, one, V, 8), _one_of_four(two, one, V, 12)
    return tl.where(eight, tl.where(four, fourth, third), tl.where(four, second, first))


@triton.jit
def _above(x, C: tl.constexpr):
    """1.0 where x lies above C, else 0.0."""
    return above(x, tl.full(x.shape, C, tl.float32))


@triton.jit
def _code_of(
    given, x, C: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, JOINT: tl.constexpr,
    PAIRS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """How many of the 2^BITS - 1 thresholds C lie below x, in float32; ``given`` is x as it was loaded."""
    if PAIRS != "":
        return count_in_pairs(given, PAIRS)
    elif BITS == 1:
        return tl.where(x > C[0], 1.0, 0.0)
    elif BITS == 2:
        return _above(x, C[0]) + _above(x, C[1]) + _above(x, C[2])
    else:
        # of each bin: how many thresholds lie below its lower end, and the next one
        ends = (tl.arange(0, BINS).to(tl.float32) - (0.5 + SHIFT)) * (1 / SCALE)
        below = _halved(ends, C, BITS)
        # behind the last threshold there is none to compare with but that one
        below = tl.minimum(below, (1 << BITS) - 2)
        following = _value_of(below, C)
        bins = bin_of(x, SCALE, SHIFT, BINS)
        if JOINT:
            return joint_code(x, looked_up(joined(following, below), bins))
        return looked_up(below.to(tl.float32), bins) + above(x, looked_up(following, bins))


@triton.jit
def _store_codes(codes_ptr, code, groups, first, own, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Pack and store codes ``[BLOCK, 8]``, given in float32."""
    place, group = tl.arange(0, GROUP)[None, :], tl.arange(0, BLOCK)
    exists = group < own
    words = codes_ptr.to(tl.pointer_type(tl.int16)) + first * (1 if BITS < 4 else 2)
    if BITS == 1:
        packed = tl.sum(code * (1 << place).to(tl.float32), axis=1).to(tl.int32)
        tl.store(codes_ptr + first + group, packed.to(codes_ptr.dtype.element_ty), mask=exists)
    elif BITS == 2:
        packed = tl.sum(code * (1 << 2 * place).to(tl.float32), axis=1).to(tl.int32)
        tl.store(words + group, packed.to(tl.int16), mask=exists)
    elif BITS == 3:
        packed = tl.sum(code * (1 << 3 * place).to(tl.float32), axis=1).to(tl.int32)
        tl.store(words + group, packed.to(tl.int16), mask=exists)
        high_plane = codes_ptr + (2 * groups.to(tl.int64) + first)
        tl.store(high_plane + group, (packed >> 16).to(codes_ptr.dtype.element_ty), mask=exists)
    else:
        # a word of 32 bits would not be exact: two of 16
        HALF: tl.constexpr = GROUP // 2
        places = tl.reshape(code, [2 * BLOCK, HALF]) * (1 << 4 * tl.arange(0, HALF)[None, :]).to(
            tl.float32
        )
        packed = tl.sum(places, axis=1).to(tl.int32)
        half = tl.arange(0, 2 * BLOCK)
        tl.store(words + half, packed.to(tl.int16), mask=half < 2 * own)


@triton.jit
def _load_plane(codes_ptr, first, own, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The program's part of the plane of codes of WIDTH bits, by groups."""
    if WIDTH == 2:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.int16))
    elif WIDTH == 4:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    group = tl.arange(0, BLOCK)
    packed = tl.load(codes_ptr + first + group, mask=group < own, other=0)
    return packed.to(tl.int32)[:, None]


@triton.jit
def _level_of(
    codes_ptr, groups, first, own, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The slopes of the codes, ``[BLOCK, 8]``."""
    place = tl.arange(0, GROUP)[None, :]
    if BITS == 1:
        packed = _load_plane(codes_ptr, first, own, 1, BLOCK)
        return tl.where((packed & (1 << place)) != 0, LEVELS[1], LEVELS[0])
    elif BITS == 2:
        # bits are tested where they lie: no code is taken out
        packed = _load_plane(codes_ptr, first, own, 2, BLOCK)
        one, two = (packed & (1 << 2 * place)) != 0, (packed & (2 << 2 * place)) != 0
        return _one_of_four(two, one, LEVELS, 0)
    else:
        if BITS == 3:
            low = _load_plane(codes_ptr, first, own, 2, BLOCK) & 65535
            high = _load_plane(codes_ptr + 2 * groups.to(tl.int64), first, own, 1, BLOCK)
            code = ((low | high << 16) >> 3 * place) & 7
        else:
            code = (_load_plane(codes_ptr, first, own, 4, BLOCK) >> 4 * place) & 15
        return looked_up(_value_of(tl.arange(0, MOST_LEVELS), LEVELS), code)


@triton.jit(do_not_specialize=["elements", "groups"])
def _codes_forward_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    elements,
    groups,
    C: tl.constexpr, LAST: tl.constexpr, CYCLIC: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, JOINT: tl.constexpr, PAIRS: tl.constexpr,
    KIND: tl.constexpr, PRECISE: tl.constexpr, COARSE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, own, offsets, mask = _tile(elements, groups, EVEN, BLOCK)
    given = tl.load(x_ptr + first * GROUP + offsets, mask=mask, other=0.0)
    x = given.to(tl.float32)
    y = _math.activate(x, KIND, PRECISE, COARSE)
    tl.store(y_ptr + first * GROUP + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    code = _code_of(given, x, C, SCALE, SHIFT, BINS, JOINT, PAIRS, BITS)
    if CYCLIC:
        code = tl.where(x >= LAST, 0.0, code)
    if KIND == "relu" or KIND == "relu6":  # torch's backward passes the gradient of a NaN on
        code = tl.where(x == x, code, 1.0)
    if not EVEN:  # of a group that is not there nothing is written
        code = tl.where(mask, code, 0.0)
    _store_codes(codes_ptr, code, groups, first, own, BITS, BLOCK)


@triton.jit(do_not_specialize=["elements", "groups"])
def _codes_backward_kernel(
    dy_ptr, codes_ptr, dx_ptr,
    elements, groups,
    LEVELS: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first, own, offsets, mask = _tile(elements, groups, EVEN, BLOCK)
    dy = tl.load(dy_ptr + first * GROUP + offsets, mask=mask, other=0.0).to(tl.float32)
    slope = _level_of(codes_ptr, groups, first, own, LEVELS, BITS, BLOCK)
    dx = _math.selected(dy, slope) if EXACT else dy * slope
    tl.store(dx_ptr + first * GROUP + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _block_groups(bits: int, *, forward: bool) -> int:
    """Groups of a program: more where it makes a table first, or computes long beside its loads."""
    return 512 if bits > (1 if forward else 2) else 256


@cache
def _compares_pairs(device: torch.device) -> bool:
    """Whether the GPU has instructions that compare two bfloat16 at once."""
    nvidia = _math.NVIDIA.value and device.type == "cuda"
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _forward_launch(
    kind: ActivationKind, bits: int, dtype: torch.dtype, even: bool, in_pairs: bool
) -> Launch:
    table = STEP_TABLES[kind][bits]
    in_pairs = in_pairs and 1 < table.bits < 4 and dtype.itemsize == 2
    inner = table.thresholds[: len(table.levels) - 1]
    thresholds = (*inner, *(0.0,) * (MOST_LEVELS.value - 1 - len(inner)))
    bins = bins_of(table) if table.bits > 2 else Bins(1.0, 0.0, 1)
    return Launch(
        _codes_forward_kernel,
        NUM_WARPS,
        C=(*thresholds, thresholds[-1]),
        LAST=table.thresholds[-1],
        CYCLIC=table.cyclic,
        BITS=table.bits,
        SCALE=bins.scale,
        SHIFT=bins.shift,
        BINS=bins.number,
        JOINT=table.bits > 2 and can_be_joined(inner, dtype),
        PAIRS=pairs_program(inner, dtype) if in_pairs else "",
        KIND=kind,
        PRECISE=dtype == torch.float32,
        COARSE=dtype == torch.bfloat16,
        EVEN=even,
        BLOCK=_block_groups(table.bits, forward=True),
    )


@cache
def _backward_launch(kind: ActivationKind, bits: int, even: bool) -> Launch:
    table = STEP_TABLES[kind][bits]
    levels = (*table.levels, *(0.0,) * (MOST_LEVELS.value - len(table.levels)))
    return Launch(
        _codes_backward_kernel,
        NUM_WARPS,
        LEVELS=levels,
        EXACT=table.exact,
        BITS=table.bits,
        EVEN=even,
        BLOCK=_block_groups(table.bits, forward=False),
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
    even = elements % CODES_PER_GROUP == 0
    launch = _forward_launch(kind, bits, x.dtype, even, _compares_pairs(x.device))
    block = _block_groups(STEP_TABLES[kind][bits].bits, forward=True)
    launch((-(-groups // block), 1, 1), (x, y, codes), (elements, groups))
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
    block = _block_groups(STEP_TABLES[kind][bits].bits, forward=False)
    launch((-(-groups // block), 1, 1), (dy, codes, dx), (elements, groups))
    return dx
