"""Linears of values that a deferred tensor gives away: what is computed, and what is saved for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import SharedInput, compiled, in_compiler, recast_linear
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.watched import Watched


def project(x: Tensor, to: Projection, dtype: torch.dtype) -> Any:
    """The projection of any tensor computed in ``dtype``, which saves as little as possible."""
    if isinstance(x, Deferred):
        return x.op.linear(x, to, dtype)
    if isinstance(x, Watched):
        x = read_input(x, x, to, dtype)
    if to.stored:
        return compiled.stored_linear((x,), *to[:3], dtype)
    return recast_linear(x, to.weight, to.bias, dtype, to.adapter)


def read_input(h: Deferred | Watched, value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """``value``, which is that of ``h``, or the tensor that several Linears read in its place."""
    if not to.shared or value.dtype != dtype or in_compiler() or not SharedInput.serves(value):
        return value
    if h._shared is None or not h._shared.is_of(value):
        h._shared = SharedInput(value)
    return h._shared.tensor


def saved_linear(value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """The projection of a tensor that is saved as it is given, or in 8 bits."""
    if to.stored:
        return compiled.stored_linear((value,), *to[:3], dtype)
    if to.adapter is None:
        if in_compiler():
            return plain_linear(value, to, dtype)
        if value.dtype == dtype and _torch_serves(to.weight, dtype):
            return F.linear(value, to.weight, to.bias)
    return recast_linear(value, to.weight, to.bias, dtype, to.adapter)


def _torch_serves(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's own Linear serves: it costs less time than ours, and under autocast keeps a
    low-precision copy of the weight, which only one that trains is worth."""
    if weight.dtype == dtype:
        return True
    return weight.requires_grad and torch.is_autocast_enabled(weight.device.type)


def plain_linear(value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """What a compiler sees of a Linear. One with an adapter stays the operator that it is: of three
    products and two sums the compiler makes four more passes over the output."""
    autocast = torch.is_autocast_enabled(value.device.type)
    if not autocast and (value.dtype != dtype or to.weight.dtype != dtype):
        return compiled.linear(value, to.weight, to.bias, dtype)  # a cast waited, a wider adapter's
    weight = to.weight if to.weight.dtype == dtype else compiled.cast(to.weight, dtype)
    return F.linear(value, weight, to.bias)
