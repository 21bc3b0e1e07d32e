"""Cross entropy of rows of logits, which are overwritten with their gradient.

The formulas stand in `lowmem_patch.functional.cross_entropy`. A program takes a row. The forward reads it
twice, once for the largest logit and the sum of exponentials, once for the gradient: the second time it
comes from the second-level cache, which holds the rows that are in work at a time.
"""

# triton ships no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cross_entropy_backward", "cross_entropy_forward"]

BLOCK = 8192
NUM_WARPS = 16


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


@triton.jit(do_not_specialize=["classes", "ignore_index"])
def _cross_entropy_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    factor_ptr,
    losses_ptr,
    logsumexp_ptr,
    row_stride,
    classes,
    ignore_index,
    smoothing,
    scale,
    cap,
    LABELLED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    FORWARD: tl.constexpr,
    GRADIENT: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * row_stride
    columns = tl.arange(0, BLOCK)
    target = tl.full((), -1, tl.int64)
    ignored = False
    if LABELLED:
        target = tl.load(target_ptr + row)
        ignored = target == ignore_index

    if FORWARD:
        largest = tl.full((BLOCK,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, classes, BLOCK):
            inside = first + columns < classes
            a = tl.load(start + first + columns, mask=inside, other=-float("inf"))
            y = _scores(a, scale, cap, SCALED, CAPPED)
            if CAPPED:
                y = tl.where(inside, y, -float("inf"))
            larger = tl.maximum(largest, y)
            # a lane that has seen nothing but -inf has no largest to subtract
            base = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(largest - base) + tl.exp(y - base)
            largest = larger
            if SMOOTHED:
                if WEIGHTED:
                    w = tl.load(weight_ptr + first + columns, mask=inside, other=0.0).to(tl.float32)
                    weighted += tl.where(inside & (w != 0.0), w * y, 0.0)
                else:
                    weighted += tl.where(inside, y, 0.0)
        base = tl.max(largest, 0)
        base = tl.where(base == -float("inf"), 0.0, base)
        logsumexp = base + tl.log(tl.sum(total * tl.exp(largest - base), 0))
        tl.store(logsumexp_ptr + row, logsumexp)
    else:
        logsumexp = tl.load(logsumexp_ptr + row)

    # what the label is worth, what each class is worth, and both together
    label = 1.0 - smoothing
    each = smoothing / classes
    together = 1.0
    if LABELLED and WEIGHTED:
        safe = tl.where(ignored, 0, target)
        label = label * tl.load(weight_ptr + safe).to(tl.float32)
        together = label
    if WEIGHTED and SMOOTHED:
        sums = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, classes, BLOCK):
            inside = first + columns < classes
            sums += tl.load(weight_ptr + first + columns, mask=inside, other=0.0).to(tl.float32)
        together += each * tl.sum(sums, 0)

    if FORWARD:
        loss = logsumexp
        if LABELLED:
            safe = tl.where(ignored, 0, target)
            y = _scores(tl.load(start + safe), scale, cap, SCALED, CAPPED)
            loss = together * logsumexp - tl.where(label == 0.0, 0.0, label * y)
            if SMOOTHED:
                loss -= each * tl.sum(weighted, 0)
            loss = tl.where(ignored, 0.0, loss)
        tl.store(losses_ptr + row, loss)

    if GRADIENT:
        factor = 1.0
        if FACTOR == "one":
            factor = tl.load(factor_ptr).to(tl.float32)
        elif FACTOR == "row":
            factor = tl.load(factor_ptr + row).to(tl.float32)
        for first in range(0, classes, BLOCK):
            inside = first + columns < classes
            a = tl.load(start + first + columns, mask=inside, other=0.0)
            y = _scores(a, scale, cap, SCALED, CAPPED)
            d = together * tl.exp(y - logsumexp)
            if LABELLED:
                d -= tl.where(first + columns == target, label, 0.0)
            if SMOOTHED:
                if WEIGHTED:
                    w = tl.load(weight_ptr + first + columns, mask=inside, other=0.0).to(tl.float32)
                    d -= each * w
                else:
                    d -= each
            d *= factor
            if CAPPED:
                d *= scale * (cap - y * y / cap)
            elif SCALED:
                d *= scale
            if LABELLED:
                d = tl.where(ignored, 0.0, d)
            tl.store(start + first + columns, d.to(logits_ptr.dtype.element_ty), mask=inside)


def _launch(
    logits: Tensor,
    target: Tensor | None,
    class_weight: Tensor | None,
    factor: Tensor | None,
    losses: Tensor | None,
    logsumexp: Tensor,
    ignore_index: int,
    smoothing: float,
    scale: float,
    cap: float,
    gradient: bool,
    factor_of: str,
) -> None:
    rows, classes = logits.shape
    if rows == 0 or classes == 0:
        return
    absent = logsumexp  # never read
    labelled = target is not None
    _cross_entropy_kernel[(rows,)](
        logits,
        target.contiguous() if target is not None else absent,
        class_weight.contiguous() if class_weight is not None else absent,
        absent if factor is None else factor,
        absent if losses is None else losses,
        logsumexp,
        logits.stride(0),
        classes,
        ignore_index,
        float(smoothing),
        float(scale),
        float(cap),
        LABELLED=labelled,
        WEIGHTED=labelled and class_weight is not None,
        SMOOTHED=labelled and smoothing != 0,
        SCALED=scale != 1,
        CAPPED=cap != 0,
        FORWARD=losses is not None,
        GRADIENT=gradient,
        FACTOR=factor_of,
        BLOCK=min(BLOCK, max(128, triton.next_power_of_2(classes))),
        num_warps=NUM_WARPS if classes > BLOCK // 2 else 4,
    )


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
    settings = (ignore_index, smoothing, scale, cap, gradient)
    factor_of = "none" if factor is None else "one"
    _launch(logits, target, class_weight, factor, losses, logsumexp, *settings, factor_of)
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
    settings = (ignore_index, smoothing, scale, cap, True)
    d_losses = d_losses.contiguous()
    _launch(logits, target, class_weight, d_losses, None, logsumexp, *settings, "row")
