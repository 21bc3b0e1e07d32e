"""Flags, eight a byte (dropout masks, sign bits)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve

__all__ = ["pack_bool", "unpack_bool"]


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


def unpack_bool(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `pack_bool`.

    Args:
        packed: ``[ceil(n / 8)]`` uint8.
        shape: shape of the mask, n elements.

    Returns:
        ``shape``, bool.

    Raises:
        TypeError: ``packed`` is not uint8.
        ValueError: ``packed`` has not ceil(n / 8) elements.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack_bool: packed must be uint8, got {packed.dtype}")
    expected = (prod(shape) + 7) // 8
    if packed.numel() != expected:
        raise ValueError(
            f"unpack_bool: shape {tuple(shape)} needs {expected} bytes, got {packed.numel()}"
        )
    return reference.unpack_bool(packed, shape)
