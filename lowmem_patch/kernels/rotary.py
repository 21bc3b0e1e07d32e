"""The rotary position embedding of one tensor, its transpose and its inverse, one pass each.

The formulas stand in `lowmem_patch.reference.rotate`. A program takes some positions of one sequence and a
block of heads; one that takes a single position reads its cos and sin once for all these heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import Launch

TILE = 4096  # elements of a program, 32 a thread


@triton.jit
def _load_angles(pointer, position, stride, column, mask, HALF: tl.constexpr):
    """Both halves of cos or sin at some positions, ``[positions, heads or 1, columns]`` as ``mask`` is."""
    offsets = tl.broadcast_to(position * stride + column, mask.shape)
    first = tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _turn(x1, x2, c1, c2, s1, s2, DIRECTION: tl.constexpr):
    if DIRECTION == "inverse":
        determinant = c1 * c2 + s1 * s2
        nothing = (c1 == 0) & (c2 == 0) & (s1 == 0) & (s2 == 0)
        determinant = tl.where(nothing, 1.0, determinant)
        return (x1 * c2 + x2 * s1) / determinant, (x2 * c1 - x1 * s2) / determinant
    elif DIRECTION == "transposed":
        return x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        return x1 * c1 - x2 * s1, x2 * c2 + x1 * s2


@triton.jit
def _copy_rest(x_ptr, y_ptr, present, REST: tl.constexpr, BLOCK: tl.constexpr):
    """The columns that do not turn."""
    column = tl.arange(0, BLOCK)[None, None, :]
    mask = present & (column < REST)
    # by way of float32: not every backend casts one half type to the other
    rest = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + column, rest.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks", "positions", "heads"])
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    blocks, positions, heads, x_batch, x_position, x_head, y_batch, y_position, y_head, cos_batch,
    cos_position, sin_batch, sin_position,
    HALF: tl.constexpr, REST: tl.constexpr, DIRECTION: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch = (program // blocks).to(tl.int64)
    position = (program % blocks).to(tl.int64) * BLOCK_POSITIONS + tl.arange(0, BLOCK_POSITIONS)
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    position, head = position[:, None, None], head[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    inside = position < positions
    present = inside & (head < heads)
    mask = present & (column < HALF)
    # Of several positions each head reads its own angles, from the first-level cache: a tile without heads
    # would be spread over the threads in another way, and shared memory is slower.
    along = mask
    if BLOCK_POSITIONS == 1:
        along = inside & (column < HALF)
    c1, c2 = _load_angles(cos_ptr + batch * cos_batch, position, cos_position, column, along, HALF)
    s1, s2 = _load_angles(sin_ptr + batch * sin_batch, position, sin_position, column, along, HALF)
    x_ptr += batch * x_batch + (position * x_position + head * x_head)
    y_ptr += batch * y_batch + (position * y_position + head * y_head)
    x1 = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + HALF + column, mask=mask, other=0.0).to(tl.float32)
    y1, y2 = _turn(x1, x2, c1, c2, s1, s2, DIRECTION)
    tl.store(y_ptr + column, y1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + HALF + column, y2.to(y_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        _copy_rest(x_ptr + 2 * HALF, y_ptr + 2 * HALF, present, REST, BLOCK_REST)


@cache
def _block_heads(heads: int, most: int) -> int:
    """The largest power of two up to ``most`` with no more than a quarter of it padding."""
    block: int = min(most, triton.next_power_of_2(heads))
    while -(-heads // block) * block * 3 > heads * 4:
        block //= 2
    return block


@cache
def _launcher(half: int, rest: int, direction: str, block_heads: int) -> tuple[Launch, int]:
    """The launcher, and the positions of a program."""
    block, block_rest = triton.next_power_of_2(half), triton.next_power_of_2(max(1, rest))
    row = triton.next_power_of_2(2 * half + rest)
    block_positions = max(1, TILE // (row * block_heads))
    num_warps = max(1, min(16, block_positions * block_heads * row // 1024))
    launch = Launch(
        _rotate_kernel,
        num_warps,
        HALF=half,
        REST=rest,
        DIRECTION=direction,
        BLOCK_POSITIONS=block_positions,
        BLOCK_HEADS=block_heads,
        BLOCK=block,
        BLOCK_REST=block_rest,
    )
    return launch, block_positions


def _strides(tensor: Tensor, *dimensions: int) -> tuple[int, ...]:
    """0 where there is one element alone: torch leaves any number there."""
    return tuple(tensor.stride(d) if tensor.shape[d] > 1 else 0 for d in dimensions)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    direction: str,
    strides: Sequence[int] | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """As of the reference."""
    if strides is None:
        y = torch.empty_like(x, dtype=out_dtype)
    else:
        y = torch.empty_strided(x.shape, strides, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return y
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    result = y if y.stride(-1) == 1 else torch.empty(x.shape, dtype=out_dtype, device=x.device)

    dimensions = (0, 3 - heads_dim, heads_dim)  # batch, position, head
    batches, positions, heads = (x.shape[d] for d in dimensions)
    columns, half = x.shape[-1], cos.shape[-1] // 2
    most = max(1, TILE // triton.next_power_of_2(columns))
    block_heads = _block_heads(heads, most)
    launch, block_positions = _launcher(half, columns - 2 * half, direction, block_heads)
    blocks = -(-positions // block_positions)
    launch(
        (batches * blocks, -(-heads // block_heads), 1),
        (x, cos, sin, result),
        (blocks, positions, heads),
        (
            *_strides(x, *dimensions),
            *_strides(result, *dimensions),
            *_strides(cos, 0, 1),
            *_strides(sin, 0, 1),
        ),
    )
    return y if result is y else y.copy_(result)
