"""Labels of classes: which rows have one, and what a mean of their losses divides by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Labels(NamedTuple):
    """What the logits are compared with.

    Attributes:
        target: ``[N]`` int64; None for logsumexp(y) in the place of a loss.
        class_weight: ``[V]``.
        ignore_index, smoothing: as of `torch.nn.functional.cross_entropy`.
    """

    target: Tensor | None
    class_weight: Tensor | None = None
    ignore_index: int = -100
    smoothing: float = 0.0


def labelled_rows(labels: Labels) -> Tensor | None:
    """The rows whose label is not ignored, where the others are worth leaving out; waits for the device."""
    target = labels.target
    if target is None or isinstance(target, FakeTensor):
        return None
    labelled = (target != labels.ignore_index).nonzero().squeeze(1)
    return labelled if len(labelled) < _WORTH * len(target) else None


_WORTH = 0.9  # share of the rows


def divisor_of(labels: Labels, dtype: torch.dtype) -> Tensor:
    """What a mean divides by: the labels that are not ignored, or their class weights."""
    assert labels.target is not None
    counts = labels.target != labels.ignore_index
    if labels.class_weight is None:
        return counts.sum(dtype=dtype)
    weights = labels.class_weight.to(dtype)[torch.where(counts, labels.target, 0)]
    return (weights * counts).sum()
