"""The gradients of a Linear's weight and of a scale of its outputs, from one product."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_gradients(
    products: Tensor, weight: Tensor, factors: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """``rowsum(products * weight)``, at least in float32, and ``factors * products`` in ``dtype``.

    Args:
        products: ``[O, F]``, at least in float32.
        weight: ``[O, F]``.
        factors: ``[O]`` or ``[1]``.
        dtype: None: the second is not asked for.
    """
    wide = torch.promote_types(products.dtype, torch.float32)
    sums = (products * weight).sum(1, dtype=wide)
    return sums, None if dtype is None else (products * factors.unsqueeze(1)).to(dtype)
