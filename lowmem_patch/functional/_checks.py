"""Argument checks that the ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from lowmem_patch.constants import ACTIVATION_KINDS, STEP_BITS, STEP_TABLES

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def check_floating(operator: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):  # what only behaves like one would lose its gradient
        raise TypeError(f"{operator}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{operator}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
        )


def check_kind(operator: str, kind: str) -> None:
    if kind not in ACTIVATION_KINDS:
        raise ValueError(f"{operator}: kind must be one of {ACTIVATION_KINDS}, got {kind!r}")


def check_table(operator: str, kind: str, bits: int) -> None:
    if kind not in STEP_TABLES:
        raise ValueError(
            f"{operator}: kind must be one of {tuple(STEP_TABLES)}, which have a step table, got {kind!r}"
        )
    if bits not in STEP_BITS:
        raise ValueError(f"{operator}: bits must be one of {STEP_BITS}, got {bits!r}")


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
