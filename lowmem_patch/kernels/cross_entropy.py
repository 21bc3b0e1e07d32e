"""Cross entropy of rows of logits, which are overwritten with their gradient.

The formulas stand in `lowmem_patch.functional.cross_entropy`. A program takes a row. The forward reads it
twice, once for the largest logit and the sum of exponentials, once for the gradient. For the second time to
come from the second-level cache, few rows are in work at a time: programs have as many threads as a
multiprocessor takes. It goes backwards, since what was read last is there, and marks what it reads and
writes as not needed again (speed: benchmarks/op_speed.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem_patch.kernels._launch import Launch, launches

BLOCK = 8192
NUM_WARPS = 16
# of rows of which the cache holds few; a HIP program has 16 warps at most
_LONG = 65536
LONG_BLOCK, LONG_WARPS = (16384, 32) if torch.version.hip is None else (BLOCK, NUM_WARPS)
VECTOR = tl.constexpr(8)  # neighbours that a thread reads at once; it finds their largest by itself


@triton.jit
def _scores(a, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    y = a.to(tl.float32)
    if SCALED:
        y = y * scale
    if CAPPED:
        y = cap * (
            1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
        )  # cap tanh(y), without overflow at both ends
    return y


@triton.jit
def _join(y, largest, total):
    """The largest and the sum of exponentials, a lane ``[LANES]``, with those of y ``[LANES, VECTOR]``."""
    larger = tl.maximum(largest, tl.max(y, 1))
    # a lane that has seen nothing but -inf has no largest to subtract
    base = tl.where(larger == -float("inf"), 0.0, larger)
    return larger, total * tl.exp(largest - base) + tl.sum(tl.exp(y - base[:, None]), 1)


@triton.jit
def _statistics(
    start, weight_ptr, classes, scale, cap,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """logsumexp(y) of a row, and for smoothing sum w y."""
    LANES: tl.constexpr = BLOCK // VECTOR
    columns = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    for first in range(0, classes, BLOCK):
        inside = first + columns < classes
        a = tl.load(start + first + columns, mask=inside, other=-float("inf"))
        y = _scores(a, scale, cap, SCALED, CAPPED)
        if CAPPED:
            y = tl.where(inside, y, -float("inf"))
        largest, total = _join(y, largest, total)
        if SMOOTHED:
            w = tl.where(inside, 1.0, 0.0)
            if WEIGHTED:
                w = tl.load(weight_ptr + first + columns, mask=inside, other=0.0).to(tl.float32)
            weighted += tl.sum(w * tl.where(w != 0.0, y, 0.0), 1)
    base = tl.max(largest, 0)
    base = tl.where(base == -float("inf"), 0.0, base)
    return base + tl.log(tl.sum(total * tl.exp(largest - base), 0)), tl.sum(weighted, 0)


@triton.jit
def _sum_of_weights(weight_ptr, classes, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, classes, BLOCK):
        inside = first + columns < classes
        sums += tl.load(weight_ptr + first + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(sums, 0)


@triton.jit
def _slope(y, d, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """The gradient of a logit from ``d``, that of its score y."""
    if CAPPED:
        d = d * scale * (cap - y * y / cap)
    elif SCALED:
        d = d * scale
    return d


@triton.jit
def _write_gradient(
    start, weight_ptr, target, logsumexp, factor, together, label, each, classes, scale, cap,
    LABELLED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of a becomes its gradient; ``factor`` is not 0."""
    if LABELLED:
        picked = _scores(tl.load(start + target), scale, cap, SCALED, CAPPED)
        tl.debug_barrier()  # the thread that overwrites it may not be the one that needs it
    columns = tl.arange(0, BLOCK)
    blocks = tl.cdiv(classes, BLOCK)
    for step in range(blocks):
        first = (blocks - 1 - step) * BLOCK
        inside = first + columns < classes
        a = tl.load(start + first + columns, mask=inside, other=0.0, eviction_policy="evict_first")
        y = _scores(a, scale, cap, SCALED, CAPPED)
        d = together * factor * tl.exp(y - logsumexp)
        if SMOOTHED:
            w = 1.0
            if WEIGHTED:
                w = tl.load(weight_ptr + first + columns, mask=inside, other=0.0).to(tl.float32)
            d -= each * factor * w
        d = _slope(y, d, scale, cap, SCALED, CAPPED)
        tl.store(
            start + first + columns, d.to(start.dtype.element_ty), mask=inside, cache_modifier=".cs"
        )
    if LABELLED:
        # one number: to ask of each column whether it is the label's takes a third of the loop
        d = together * tl.exp(picked - logsumexp) - label
        if SMOOTHED:
            w = 1.0
            if WEIGHTED:
                w = tl.load(weight_ptr + target).to(tl.float32)
            d -= each * w
        d = _slope(picked, d * factor, scale, cap, SCALED, CAPPED)
        tl.debug_barrier()
        inside = (target >= 0) & (target < classes)  # what is not is an error elsewhere
        tl.store(start + target, d.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _write_zeros(start, classes, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), start.dtype.element_ty)
    for first in range(0, classes, BLOCK):
        tl.store(start + first + columns, zeros, mask=first + columns < classes)


@triton.jit(do_not_specialize=["ignore_index", "smoothing", "scale", "cap"])
def _cross_entropy_kernel(
    logits_ptr, target_ptr, weight_ptr, factor_ptr, losses_ptr, logsumexp_ptr,
    ignore_index, smoothing, scale, cap, row_stride, classes,
    LABELLED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, FORWARD: tl.constexpr, GRADIENT: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * row_stride
    target = tl.full((), -1, tl.int64)
    ignored = target != -1
    if LABELLED:
        target = tl.load(target_ptr + row)
        ignored = target == ignore_index
    safe = tl.where(ignored, 0, target)

    weighted = 0.0
    if FORWARD:
        logsumexp, weighted = _statistics(
            start, weight_ptr, classes, scale, cap, WEIGHTED, SMOOTHED, SCALED, CAPPED, BLOCK
        )
        tl.store(logsumexp_ptr + row, logsumexp)
    else:
        logsumexp = tl.load(logsumexp_ptr + row)

    # what the label is worth, what each class is worth, and both together
    label, each, together = 1.0 - smoothing, smoothing / classes, 1.0
    if WEIGHTED:
        label = label * tl.load(weight_ptr + safe).to(tl.float32)
        together = label
        if SMOOTHED:
            together += each * _sum_of_weights(weight_ptr, classes, BLOCK)

    if FORWARD:
        loss = logsumexp
        if LABELLED:
            picked = _scores(tl.load(start + safe), scale, cap, SCALED, CAPPED)
            loss = together * logsumexp - tl.where(label == 0.0, 0.0, label * picked)
            if SMOOTHED:
                loss -= each * weighted
            loss = tl.where(ignored, 0.0, loss)
        tl.store(losses_ptr + row, loss)

    if GRADIENT:
        factor = 1.0
        if FACTOR == "one":
            factor = tl.load(factor_ptr).to(tl.float32)
        elif FACTOR == "row":
            factor = tl.load(factor_ptr + row).to(tl.float32)
        # whatever stands in the row
        if ignored | (factor == 0.0):
            _write_zeros(start, classes, BLOCK)
        else:
            _write_gradient(
                start, weight_ptr, safe, logsumexp, factor, together, label, each, classes, scale, cap,
                LABELLED, WEIGHTED, SMOOTHED, SCALED, CAPPED, BLOCK,
            )  # fmt: skip


@cache
def _cross_entropy_launch(classes: int, *constants: Any) -> Launch:
    block, num_warps = max(128, triton.next_power_of_2(classes)), 4
    if classes > BLOCK // 2:
        block, num_warps = (LONG_BLOCK, LONG_WARPS) if classes > _LONG else (BLOCK, NUM_WARPS)
    return launches(_cross_entropy_kernel, num_warps, block)(*constants)


def _launch(
    logits: Tensor,
    target: Tensor | None,
    class_weight: Tensor | None,
    factor: Tensor | None,
    losses: Tensor | None,
    logsumexp: Tensor,
    settings: tuple[int, float, float, float],
    gradient: bool,
    factor_of: str,
) -> None:
    rows, classes = logits.shape
    if rows == 0 or classes == 0:
        return
    ignore_index, smoothing, scale, cap = settings
    labelled = target is not None
    weighted = labelled and class_weight is not None
    tensors = [target, class_weight, factor, losses]
    launch = _cross_entropy_launch(
        classes, labelled, weighted, labelled and smoothing != 0, scale != 1, cap != 0,
        losses is not None, gradient, factor_of,
    )  # fmt: skip
    # what is absent is never read
    present = [logsumexp if tensor is None else tensor.contiguous() for tensor in tensors]
    numbers = (ignore_index, float(smoothing), float(scale), float(cap))
    # a row's length decides how it is read, as a stride does
    launch((rows, 1, 1), (logits, *present, logsumexp), numbers, (logits.stride(0), classes))


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor | None,
    class_weight: Tensor | None,
    factor: Tensor | None,
    ignore_index: int,
    smoothing: float,
    scale: float,
    cap: float,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Loss and logsumexp ``[n]`` float32; ``[n, V]`` logits become ``factor`` times their gradient."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    logsumexp = torch.empty_like(losses)
    settings = (ignore_index, smoothing, scale, cap)
    factor_of = "none" if factor is None else "one"
    _launch(logits, target, class_weight, factor, losses, logsumexp, settings, gradient, factor_of)
    return losses, logsumexp


def cross_entropy_backward(
    logits: Tensor,
    logsumexp: Tensor,
    d_losses: Tensor,
    target: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    scale: float,
    cap: float,
) -> None:
    """Overwrite ``[n, V]`` logits with their gradient."""
    settings = (ignore_index, smoothing, scale, cap)
    _launch(logits, target, class_weight, d_losses, None, logsumexp, settings, True, "row")


@triton.jit(do_not_specialize=["elements"])
def _scale_kernel(tensor_ptr, factor_ptr, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr).to(tl.float32)
    # one condition for 16 elements, so that the access stays a vector
    inside = offsets // 16 * 16 < elements
    value = tl.load(tensor_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(tensor_ptr + offsets, (value * factor).to(tensor_ptr.dtype.element_ty), mask=inside)


_scale_launch = Launch(_scale_kernel, 4, BLOCK=4096)


def scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    """tensor *= factor ``[]``; torch's own kernel for this reads one element at a time."""
    elements = tensor.numel()
    if elements % 16 or not tensor.is_contiguous():
        tensor.mul_(factor)
    elif elements:
        _scale_launch((-(-elements // 4096), 1, 1), (tensor, factor), (elements,))
