"""Numbers looked up in a table instead of compared with each threshold.

x falls into one of equal bins so narrow that no bin has two thresholds. The bin says how many thresholds lie
below it, and the only one that x is still to be compared with. In which bin an x is may be rounded, and
differently by different machines, as long as a larger x is in no lower bin and each threshold is in its own:
the comparison alone decides.

Where a GPU compares two half numbers at once, up to seven thresholds take less time than a look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lowmem_patch.constants import StepTable
from lowmem_patch.kernels import _math

ROUNDING = tl.constexpr(1.5 * 2**23)


class Bins(NamedTuple):
    """x is in the bin with the number x * scale + shift, rounded and cut to 0 .. number - 1."""

    scale: float
    shift: float
    number: int


@cache
def bins_of(table: StepTable) -> Bins:
    """Bins of which none has two thresholds, with these as far from the bins' ends as they can be."""
    thresholds = table.thresholds[: len(table.levels) - 1]
    number = 4 * len(table.levels)
    scale = (number - 2) / (thresholds[-1] - thresholds[0])

    def distance(part: int) -> float:
        places = ((value - thresholds[0]) * scale + part / 64 for value in thresholds)
        return min(abs(place % 1 - 0.5) for place in places)

    shift = max(range(64), key=distance) / 64 - thresholds[0] * scale
    return Bins(scale, shift, number)


def largest_not_above(
    thresholds: Sequence[float] | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The largest number of ``dtype`` that is not above each threshold: what lies above one, lies above the
    other."""
    exact = torch.as_tensor(thresholds)
    rounded = exact.to(dtype)
    below = rounded.nextafter(torch.tensor(-float("inf"), dtype=dtype))
    return torch.where(rounded.float() > exact, below, rounded)


def pairs_program(thresholds: Sequence[float], dtype: torch.dtype) -> str:
    """Assembly that counts, of two half numbers, the thresholds below each, in float32.

    It is of NVIDIA's compute capability 9.0, and takes an instruction to compare with a threshold and one to
    add, for both numbers.
    """
    places = largest_not_above(thresholds, dtype).view(torch.int16).tolist()
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    lines = [".reg .b32 threshold, is_above, count;", ".reg .b16 low, high;"]
    for number, place in enumerate(places):
        result = "is_above" if number else "count"
        lines += [
            f"mov.b32 threshold, 0x{place & 0xFFFF:04x}{place & 0xFFFF:04x};",
            f"set.gt.{kind}.{kind} {result}, $2, threshold;",
        ]
        if number:
            lines.append(f"add.rn.{kind} count, count, is_above;")
    if dtype == torch.bfloat16:  # the upper half of a float32
        lines += ["shl.b32 $0, count, 16;", "and.b32 $1, count, 0xffff0000;"]
    else:
        lines += ["mov.b32 {low, high}, count;", "cvt.f32.f16 $0, low;", "cvt.f32.f16 $1, high;"]
    return "\n".join(("{", *lines, "}"))


@triton.jit
def count_in_pairs(half, PROGRAM: tl.constexpr):
    """What a program of `pairs_program` counts, in float32."""
    return tl.inline_asm_elementwise(
        PROGRAM, "=r,=r,r", [half], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def looked_up(table, index):
    """``table[index]`` for a table of one dimension and an index of two."""
    flat = tl.gather(table, tl.reshape(index, [index.shape[0] * index.shape[1]]), 0)
    return tl.reshape(flat, index.shape)


@triton.jit
def above(x, threshold):
    """1.0 where x lies above ``threshold``, else 0.0: on NVIDIA's GPUs one instruction instead of two."""
    if _math.NVIDIA:
        return tl.inline_asm_elementwise(
            "set.gt.f32.f32 $0, $1, $2;",
            "=f,f,f",
            [x, threshold],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.where(x > threshold, 1.0, 0.0)


# Of a threshold and a count in one number, the count has the lowest bits of the mantissa.
_COUNT = tl.constexpr(15)
_ONES = tl.constexpr(0x4B000000)  # 2^23, to whose bits a small integer is added
_TWO_23 = tl.constexpr(2.0**23)


def can_be_joined(thresholds: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether no number of ``dtype`` lies between a threshold and the one that `joined` compares with."""
    if dtype.itemsize != 2 or not _math.NVIDIA:
        return False
    exact = torch.tensor(thresholds)
    bits = exact.view(torch.int32)
    # the largest of them
    upper = torch.where(exact < 0, bits - 15 & ~15, torch.where(exact > 0, bits + 15 & ~15, 0) | 15)
    upper = upper.view(torch.float32)
    return torch.equal(largest_not_above(exact, dtype), largest_not_above(upper, dtype))


@triton.jit
def joined(threshold, count):
    """A threshold, a little higher, with a count of 0 to 15 in its lowest bits."""
    bits = threshold.to(tl.int32, bitcast=True)
    # the higher one of a positive threshold has larger bits, that of a negative one smaller ones
    cut = tl.where(threshold > 0.0, bits + _COUNT, tl.where(threshold < 0.0, bits - _COUNT, 0))
    return ((cut & (-1 - _COUNT)) | count).to(tl.float32, bitcast=True)


@triton.jit
def joint_code(x, both):
    """How many thresholds lie below x, of what `joined` gave for its bin; in float32."""
    bits = both.to(tl.int32, bitcast=True)
    count = ((bits & _COUNT) | _ONES).to(tl.float32, bitcast=True) - _TWO_23
    return count + above(x, both)


@triton.jit
def bin_of(x, SCALE: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """x * SCALE + SHIFT, rounded, between 0 and BINS - 1."""
    LAST: tl.constexpr = BINS - 1
    if _math.NVIDIA:
        # one instruction, where a multiplication, a minimum and a maximum take the time of five
        part = _math.saturated(
            x,
            tl.full(x.shape, SCALE / LAST, tl.float32),
            tl.full(x.shape, SHIFT / LAST, tl.float32),
        )
        place = part * LAST
    else:
        place = tl.minimum(tl.maximum(x * SCALE + SHIFT, 0.0), LAST * 1.0)
    # with this added, a number's lowest bits are those of the nearest integer
    return (place + ROUNDING).to(tl.int32, bitcast=True) & LAST
