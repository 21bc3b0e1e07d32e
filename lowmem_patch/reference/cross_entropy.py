"""Cross entropy of rows of logits, which are overwritten with their gradient, in eager torch.

The formulas stand in `lowmem_patch.functional.cross_entropy`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowmem_patch.constants import wide


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
    """The loss of each row and logsumexp(y), as `lowmem_patch.functional.cross_entropy` defines them.

    Args:
        logits: ``[n, V]``; overwritten with ``factor`` times the gradient, where that is asked for.
        target: ``[n]`` int64; None for logsumexp(y) in the place of the loss.
        class_weight: ``[V]`` or None.
        factor: ``[]`` or None, for 1.

    Returns:
        both ``[n]``, float32, float64 for float64 logits.
    """
    y = _scores(logits, scale, cap)
    logsumexp = y.logsumexp(-1)
    losses = logsumexp.clone()
    if target is not None:
        index, label, each, together = _label_weights(
            y, target, class_weight, ignore_index, smoothing
        )
        picked = y.gather(1, index[:, None]).squeeze(1)
        losses = together * logsumexp - torch.where(label == 0, 0, label * picked)
        if smoothing:
            losses = losses - (each * y if class_weight is None else _product(each, y)).sum(-1)
        losses = torch.where(target == ignore_index, 0, losses)
    if gradient:
        d_losses = torch.ones_like(losses) if factor is None else factor.expand(losses.shape)
        arguments = (target, class_weight, ignore_index, smoothing, scale, cap)
        cross_entropy_backward(logits, logsumexp, d_losses, *arguments)
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
    """Overwrite ``[n, V]`` logits with their gradient, for ``d_losses`` ``[n]``."""
    y = _scores(logits, scale, cap)
    slope = scale if cap == 0 else scale * (cap - y * y / cap)
    # the logits themselves, where nothing was cast or scaled
    d_y = y.sub_(logsumexp[:, None]).exp_()
    if target is not None:
        index, label, each, together = _label_weights(
            y, target, class_weight, ignore_index, smoothing
        )
        d_y.mul_(together[:, None]).scatter_add_(1, index[:, None], -label[:, None])
        if smoothing:
            d_y.sub_(each)
    d_y.mul_(d_losses[:, None]).mul_(slope)
    if target is not None:  # a factor of infinity, too, where every row is to be ignored
        d_y.masked_fill_((target == ignore_index)[:, None], 0)
    logits.copy_(d_y)


def _scores(logits: Tensor, scale: float, cap: float) -> Tensor:
    y = logits.to(wide(logits.dtype))
    if cap:
        return cap * torch.tanh(y * scale)
    return y if scale == 1 else y * scale


def _product(weights: Tensor, y: Tensor) -> Tensor:
    """weights y, where a weight of 0 takes no part, whatever y is."""
    return torch.where(weights == 0, 0, weights * y)


def _label_weights(
    y: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The label of each row, what it is worth, what each class is worth, and both together."""
    classes = y.shape[1]
    weights = y.new_ones(classes) if class_weight is None else class_weight.to(y.dtype)
    index = torch.where(target == ignore_index, 0, target)
    label, each = (1 - smoothing) * weights[index], smoothing / classes * weights
    return index, label, each, label + each.sum()


def scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    """tensor *= factor ``[]``."""
    tensor.mul_(factor)
