"""The ops on DTensors: made of torch's own, since torch knows of no other op how to shard it.

Values of elementwise ops are recomputed in backward, casts repeated. A norm saves its input: where that is
sharded by the sequence, the Linears behind it read a gathered copy of its output, and share nothing with it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_patch import reference
from lowmem_patch.constants import NormSettings
from lowmem_patch.functional import _library, compiled

_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def is_sharded(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor."""
    if _library.in_compiler():
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
    settings: NormSettings,
    out_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    z_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`ms_norm`, recomputed from ``x`` in backward."""
    z = None if z_dtype is None else _norm(x.detach(), None, None, settings, z_dtype)
    arguments = (x, weight, bias, settings, out_dtype)
    if _library.wants_gradient(x, weight, bias):
        y: Tensor = checkpoint(_norm, *arguments, use_reentrant=False)
    else:  # a checkpoint would hold the input
        y = _norm(*arguments)
    return y, None if copy_dtype is None else y.to(copy_dtype), z


def _norm(*arguments: Any) -> Tensor:
    return reference.norm(*arguments)[0]


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
    lora_A, lora_B, scale = adapter
    low = compiled.linear(x, lora_A, None, dtype)
    return y + compiled.linear(low, lora_B, None, dtype) * scale
