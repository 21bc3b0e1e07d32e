"""Flags, eight a byte (dropout masks, sign bits)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve

_pack = _library.Operator(
    "pack_bool(Tensor mask, str implementation) -> Tensor",
    dispatched("pack_bool"),
    lambda mask, implementation: mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8),
)


def pack_bool(mask: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """Pack flags, eight a byte, first flag lowest.

    Args:
        mask: ``[...]``, bool, n elements.
        implementation: see `resolve`.

    Returns:
        ``[ceil(n / 8)]`` uint8.

    Raises:
        TypeError: ``mask`` is not bool.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"pack_bool: mask must be bool, got {mask.dtype}")
    packed: Tensor = _pack(mask, resolve(implementation, mask))
    return packed
