"""Activation with two bits per element saved for backward, and the backward from those bits.

h~(x) = sum a_i relu(x - c_i) stands in for h in backward (arXiv 2406.16282, section 4):
dx = dy h~'(x), and h~'(x) = level[code] with code = number of thresholds below x, 0..3.
Saved: the codes, eight per int16 word, element 8 w + i in bits 2 i and 2 i + 1 of word w; only the
last word is padded (with zeros). Eight elements are one 16-byte load of a half tensor, so a word is
packed inside one thread.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.constants import CODES_PER_WORD, STEP_TABLES, ActivationKind
from lowmem_patch.kernels import _math
from lowmem_patch.kernels._launch import Launch, empty

__all__ = ["codes_backward", "codes_forward"]

BLOCK_WORDS = 256
NUM_WARPS = 4
WORD = tl.constexpr(CODES_PER_WORD)


@triton.jit(do_not_specialize=["elements", "words"])
def _codes_forward_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    elements,
    words,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    KIND: tl.constexpr,
    PRECISE: tl.constexpr,
    COARSE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.arange(0, WORD)
    offsets = word[:, None] * WORD + position[None, :]
    if EVEN:
        # one condition for a whole word, so that the access stays one vector
        mask = tl.broadcast_to((word < words)[:, None], offsets.shape)
    else:
        mask = offsets < elements
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = _math.activate(x, KIND, PRECISE, COARSE)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    # each threshold below x adds one at the element's place in the word
    unit = tl.where(mask, (1 << (2 * position))[None, :], 0)
    code = tl.where(x > C1, unit, 0) + tl.where(x > C2, unit, 0) + tl.where(x > C3, unit, 0)
    packed = tl.sum(code, axis=1)
    tl.store(codes_ptr + word, packed.to(tl.int16), mask=word < words)


@triton.jit(do_not_specialize=["elements", "words"])
def _codes_backward_kernel(
    dy_ptr,
    codes_ptr,
    dx_ptr,
    elements,
    words,
    LEVEL1: tl.constexpr,
    LEVEL2: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.arange(0, WORD)
    offsets = word[:, None] * WORD + position[None, :]
    if EVEN:
        mask = tl.broadcast_to((word < words)[:, None], offsets.shape)
    else:
        mask = offsets < elements
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    packed = tl.load(codes_ptr + word, mask=word < words, other=0).to(tl.int32)
    code = (packed[:, None] >> (2 * position)[None, :]) & 3
    inner = tl.where(code == 1, LEVEL1, LEVEL2)
    slope = tl.where(code == 0, 0.0, tl.where(code == 3, 1.0, inner))
    tl.store(dx_ptr + offsets, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)


@cache
def _forward_launch(kind: ActivationKind, dtype: torch.dtype, even: bool) -> Launch:
    c1, c2, c3 = STEP_TABLES[kind].thresholds
    return Launch(
        _codes_forward_kernel,
        NUM_WARPS,
        C1=c1,
        C2=c2,
        C3=c3,
        KIND=kind,
        PRECISE=dtype == torch.float32,
        COARSE=dtype == torch.bfloat16,
        EVEN=even,
        BLOCK=BLOCK_WORDS,
    )


@cache
def _backward_launch(kind: ActivationKind, even: bool) -> Launch:
    _, level1, level2, _ = STEP_TABLES[kind].levels
    return Launch(
        _codes_backward_kernel,
        NUM_WARPS,
        LEVEL1=level1,
        LEVEL2=level2,
        EVEN=even,
        BLOCK=BLOCK_WORDS,
    )


def codes_forward(x: Tensor, kind: ActivationKind) -> tuple[Tensor, Tensor]:
    """y = h(x), contiguous, and codes ``[ceil(n / 8)]`` int16."""
    x = x.contiguous()
    y = torch.empty_like(x)
    elements = x.numel()
    words = -(-elements // CODES_PER_WORD)
    codes = x.new_empty(words, dtype=torch.int16)
    if elements == 0:
        return y, codes
    launch = _forward_launch(kind, x.dtype, elements % CODES_PER_WORD == 0)
    launch((-(-words // BLOCK_WORDS), 1, 1), (x, y, codes), (elements, words))
    return y, codes


def codes_backward(dy: Tensor, codes: Tensor, kind: ActivationKind, dtype: torch.dtype) -> Tensor:
    """dx = dy * level[code], shape of ``dy``, contiguous, in ``dtype``."""
    dy = dy.contiguous()
    dx = empty(dy, dtype)
    elements = dy.numel()
    if elements == 0:
        return dx
    words = codes.numel()
    launch = _backward_launch(kind, elements % CODES_PER_WORD == 0)
    launch((-(-words // BLOCK_WORDS), 1, 1), (dy, codes, dx), (elements, words))
    return dx
