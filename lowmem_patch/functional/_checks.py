"""Argument checks that the ops share."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def check_floating(operator: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):  # what only behaves like one would lose its gradient
        raise TypeError(f"{operator}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{operator}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
        )


def check_last_dimension(
    operator: str, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """``x`` has at least one dimension and the vectors, where given, the size of its last one."""
    if x.dim() < 1:
        raise ValueError(f"{operator}: x must have at least one dimension, got shape ()")
    size = x.shape[-1:]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != size:
            raise ValueError(
                f"{operator}: {name} must have shape ({size[0]},) for x of shape "
                f"{tuple(x.shape)}, got {tuple(vector.shape)}"
            )
