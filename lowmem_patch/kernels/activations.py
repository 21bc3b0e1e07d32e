"""Activations and gated products, forward and backward, one kernel each.

y = h(gate) up:  d_gate = dy up h'(gate),  d_up = dy h(gate).  Saved: gate and up.
y = h(x):        dx = dy h'(x).                                Saved: x.
The backward can write y again as well, for a weight's gradient. Its results may take the place of what it
reads: each that of a tensor from which it is computed, or y that of dy, whose last use lies before.
Inputs are read in place through their row stride (halves of a packed projection), and gradients are written
so where their places are some columns of a tensor; other outputs are contiguous. Contiguous tensors are one
long row. The backward also reads x, or gate and up, in 8 bits, and rounds their values to their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import EIGHT_BIT_GROUP, ActivationKind, EightBits
from lowmem_patch.kernels import _math
from lowmem_patch.kernels._launch import as_rows, common_rows, empty, launches
from lowmem_patch.kernels.eight_bit import values_of

BLOCK = 1024
NUM_WARPS = 4
GROUP = tl.constexpr(EIGHT_BIT_GROUP)


# `columns` is specialised on divisibility by 16 like a stride (two variants): without it the masked
# accesses of the last block would be scalar.
@triton.jit(do_not_specialize=["blocks_per_row"])
def _forward_kernel(
    x_ptr, up_ptr, y_ptr,
    blocks_per_row, columns, x_stride, up_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, PRECISE: tl.constexpr, COARSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks_per_row
    column = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = _math.activate(x, KIND, PRECISE, COARSE)
    if GATED:
        y *= tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _read(
    pointer, scales_ptr, place, mask, group, known, LARGEST: tl.constexpr, DTYPE: tl.constexpr
):
    """Values in float32; of 8 bits, whose ``[groups, 128]`` have one scale a row, where LARGEST is not 0."""
    x = tl.load(pointer + place, mask=mask, other=0.0 if LARGEST == 0.0 else 0).to(tl.float32)
    if LARGEST != 0.0:
        scale = tl.load(scales_ptr + group, mask=known, other=0.0).to(tl.float32)
        x = values_of(x, scale[:, None], LARGEST).to(DTYPE).to(tl.float32)
    return x


# the scales begin where no stride is a multiple of 16
@triton.jit(do_not_specialize=["blocks_per_row", "first_group"])
def _backward_kernel(
    dy_ptr, x_ptr, up_ptr, dx_ptr, d_up_ptr, hidden_ptr, x_scales_ptr, up_scales_ptr,
    blocks_per_row, first_group, columns, dy_stride, x_stride, up_stride, dx_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, HIDDEN: tl.constexpr, PRECISE: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks_per_row
    start = (program % blocks_per_row) * BLOCK
    if LARGEST == 0.0:
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        group, known = row, mask  # unread
    else:
        begin = start + tl.arange(0, BLOCK // GROUP) * GROUP
        column = begin[:, None] + tl.arange(0, GROUP)[None, :]
        # one condition for a whole group, so that each access stays a vector
        known = begin < columns
        mask = tl.broadcast_to(known[:, None], column.shape)
        group = first_group + row * (x_stride // GROUP) + begin // GROUP
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    place = row * x_stride + column
    x = _read(
        x_ptr, x_scales_ptr, place, mask, group, known, LARGEST, dx_ptr.dtype.element_ty
    )  # fmt: skip
    y, slope = _math.activate_and_slope(x, KIND, PRECISE)
    if GATED:
        d_up = (dy * y).to(d_up_ptr.dtype.element_ty)
        tl.store(d_up_ptr + row * dx_stride + column, d_up, mask=mask)
        place = row * up_stride + column
        up = _read(
            up_ptr, up_scales_ptr, place, mask, group, known, LARGEST, d_up_ptr.dtype.element_ty
        )  # fmt: skip
        dy *= up
        y *= up
    if HIDDEN:  # behind the last use of dy, whose place it may take
        tl.store(hidden_ptr + row * columns + column, y.to(hidden_ptr.dtype.element_ty), mask=mask)
    tl.store(
        dx_ptr + row * dx_stride + column,
        _math.times_slope(dy, slope, KIND).to(dx_ptr.dtype.element_ty),
        mask=mask,
    )


_forward_launch = launches(_forward_kernel, NUM_WARPS, BLOCK)
_backward_launch = launches(_backward_kernel, NUM_WARPS, BLOCK)


def activation_forward(
    x: Tensor, up: Tensor | None, kind: ActivationKind, out_dtype: torch.dtype | None = None
) -> Tensor:
    """h(x) or h(x) * up, contiguous, in ``out_dtype`` or the promoted dtype."""
    if out_dtype is None:
        out_dtype = x.dtype if up is None else torch.promote_types(x.dtype, up.dtype)
    y = empty(x, out_dtype)
    if x.numel() == 0:
        return y
    tensors, strides, rows, columns = common_rows(x) if up is None else common_rows(x, up)
    blocks_per_row = -(-columns // BLOCK)
    launch = _forward_launch(
        kind, up is not None, out_dtype == torch.float32, out_dtype == torch.bfloat16
    )
    launch(
        (rows * blocks_per_row, 1, 1),
        (tensors[0], tensors[-1], y),
        (blocks_per_row,),
        (columns, strides[0], strides[-1]),
    )
    return y


def activation_backward(
    dy: Tensor,
    x: Tensor | EightBits,
    up: Tensor | EightBits | None,
    kind: ActivationKind,
    hidden: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """dx = dy * h'(x); or d_x = dy * up * h'(x) and d_up = dy * h(x). Contiguous, each in its input's dtype.

    h(x) or h(x) * up goes into ``hidden``, where given (contiguous), and the gradients go into ``into``,
    contiguous or the same columns as x and up of larger tensors, at least 128. Places of what is read: hidden
    that of dy or x; dx that of dy, or x where there is no hidden; d_x that of up, and d_up that of dy or x.
    """
    sources = [x] if up is None else [x, up]
    given, scales, first_group = _parts(sources)
    largest = torch.finfo(x.dtype).max if scales else 0.0
    precise = torch.float32 in {t.dtype for t in (*sources, hidden) if t is not None}
    if into is None:
        into = [empty(t, source.dtype) for t, source in zip(given, sources, strict=True)]
    dx, d_up = into[0], into[-1]
    if dx.numel() == 0:
        return into
    tensors, strides, rows, columns = common_rows(dy, *given)
    dx_stride = columns if dx.is_contiguous() else as_rows(dx)[1]
    blocks_per_row = -(-columns // BLOCK)
    # what is absent is never written, or read
    scales = scales or [dx]
    tensors = (tensors[0], tensors[1], tensors[-1], dx, d_up, dx if hidden is None else hidden)
    _backward_launch(kind, up is not None, hidden is not None, precise, largest)(
        (rows * blocks_per_row, 1, 1),
        (*tensors, scales[0], scales[-1]),
        (blocks_per_row, first_group),
        (columns, strides[0], strides[1], strides[-1], dx_stride),
    )
    return into


def _parts(sources: list[Any]) -> tuple[list[Tensor], list[Tensor], int]:
    """Tensors, or integers, the scales of these, and the group in which their columns begin."""
    if not isinstance(sources[0], EightBits):
        return sources, [], 0
    scales = [source.scales for source in sources]
    return [source.integers for source in sources], scales, sources[0].first_group
