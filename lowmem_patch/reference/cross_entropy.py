"""Cross entropy of rows of logits, which are overwritten with their gradient, in eager torch.

The formulas stand in `lowmem_patch.functional.cross_entropy`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cross_entropy_backward", "cross_entropy_forward", "scale_in_place"]


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
    losses = logsumexp
    if target is not None:
        q = _label_weights(y, target, class_weight, ignore_index, smoothing)
        losses = q.sum(-1) * logsumexp - torch.where(q == 0, 0, q * y).sum(-1)
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
    d_y = (y - logsumexp[:, None]).exp()
    if target is not None:
        q = _label_weights(y, target, class_weight, ignore_index, smoothing)
        d_y = q.sum(-1, keepdim=True) * d_y - q
    d_y = d_y * d_losses[:, None]
    if target is not None:  # a factor of infinity, too, where every row is to be ignored
        d_y = torch.where((target == ignore_index)[:, None], 0, d_y)
    logits.copy_(d_y * (scale if cap == 0 else scale * (cap - y * y / cap)))


def _scores(logits: Tensor, scale: float, cap: float) -> Tensor:
    y = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return y if cap == 0 else cap * y.tanh()


def _label_weights(
    y: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    """q of each row: how much of the loss each class is."""
    weights = y.new_ones(y.shape[1]) if class_weight is None else class_weight.to(y.dtype)
    index = torch.where(target == ignore_index, 0, target)
    q = (smoothing / y.shape[1] * weights).repeat(len(target), 1)
    return q.scatter_add(1, index[:, None], (1 - smoothing) * weights[index][:, None])


def scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    """tensor *= factor ``[]``."""
    tensor.mul_(factor)
