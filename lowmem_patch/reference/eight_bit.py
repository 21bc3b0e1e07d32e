"""8-bit storage in eager torch; see `lowmem_patch.functional.eight_bit`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import EIGHT_BIT_GROUP, EIGHT_BIT_LEVELS, EightBits


def to_eight_bits(x: Tensor, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The integers and the scale of each group of `EIGHT_BIT_GROUP` neighbours.

    Args:
        x: ``[n]``, float16, bfloat16 or float32.
        into: memory for the results.

    Returns:
        ``[n]`` int8 and ``[ceil(n / group)]`` bfloat16: x is about integer * scale.
    """
    groups = -(-x.numel() // EIGHT_BIT_GROUP)
    rows = F.pad(x.float(), (0, groups * EIGHT_BIT_GROUP - x.numel())).view(groups, EIGHT_BIT_GROUP)
    wide = _rounded_up(rows.abs().amax(1) * (1 / EIGHT_BIT_LEVELS))
    # float32 does not hold the inverse of a smaller one
    wide = torch.where(wide < torch.finfo(torch.float32).tiny, 0.0, wide)
    inverse = torch.where(wide == 0.0, 0.0, 1.0 / wide)
    integers = (rows * inverse[:, None]).nan_to_num(0.0).round()
    integers = integers.clamp(-EIGHT_BIT_LEVELS, EIGHT_BIT_LEVELS).to(torch.int8)
    results = integers.view(-1)[: x.numel()].clone(), wide.bfloat16()
    if into is None:
        return results
    for memory, result in zip(into, results, strict=True):
        memory.copy_(result)
    return into


def _rounded_up(x: Tensor) -> Tensor:
    """Positive numbers up to what bfloat16 holds, whose 16 bits are the upper ones of a float32."""
    bits = torch.where(x.isfinite(), x, torch.nan).view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def from_eight_bits(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``[n]`` in ``dtype``, of the results of `to_eight_bits`."""
    spread = scales.float().repeat_interleave(EIGHT_BIT_GROUP)[: integers.numel()]
    # the scale was rounded up, so that 127 of it may lie above the largest number; NaN stays NaN
    largest = torch.finfo(dtype).max
    return (integers.float() * spread).clamp(-largest, largest).to(dtype)


def values_of(x: Tensor | EightBits) -> Tensor:
    """A tensor itself, or ``[..., F]`` in the dtype of what is stored in 8 bits."""
    if isinstance(x, Tensor):
        return x
    rows = x.integers.reshape(-1, x.integers.shape[-1])
    first, last = x.first_group, x.first_group + rows.shape[1] // EIGHT_BIT_GROUP
    scales = x.scales.view(rows.shape[0], -1)[:, first:last].reshape(-1)
    return from_eight_bits(rows.reshape(-1), scales, x.dtype).view(x.integers.shape)
