"""The ops on DTensors: made of torch's own, since torch knows of no other op how to shard it.

Values of elementwise ops are recomputed in backward, casts repeated. A norm keeps its input: where that is
sharded by the sequence, the Linears behind it read a gathered copy of its output, and share nothing with it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_patch import reference
from lowmem_patch.functional import _library, compiled

__all__ = ["is_sharded", "linear", "norm"]

_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def is_sharded(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor."""
    if torch.compiler.is_compiling():
        return False
    # a loop that most calls leave at once: this runs at each call of each op
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            module = sys.modules.get("torch.distributed.tensor")  # a second to import
            if module is not None and isinstance(tensor, module.DTensor):
                return True
    return False


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centered: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension, recomputed from ``x`` in backward."""
    arguments = (x, weight, bias, eps, weight_offset, centered, out_dtype)
    if not _library.wants_gradient(x, weight, bias):  # a checkpoint would hold the input
        return _norm(*arguments)
    y: Tensor = checkpoint(_norm, *arguments, use_reentrant=False)
    return y


def _norm(*arguments: Any) -> Tensor:
    return reference.normalised(*arguments)[0]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    adapter: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """F.linear in ``dtype``, plus an adapter's product; casts are repeated in backward."""
    y = compiled.linear(x, weight, bias, dtype)
    if adapter is None:
        return y
    down, up, scale = adapter
    return y + compiled.linear(compiled.linear(x, down, None, dtype), up, None, dtype) * scale
