"""Frozen Linears of 4 bits, whose weight a LoRA layer's op unpacks for each product (QLoRA).

PEFT's layer runs bitsandbytes' Linear, copies its result, and adds the adapter's product to it: four more
passes over the output, and two tensors of its size for a while. The op adds the product where it lies.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import PackedWeight

_FILE = "bitsandbytes.nn.modules"


def is_four_bit(base: nn.Module) -> bool:
    """Whether this is bitsandbytes' Linear of 4 bits, whose class has its own forward still."""
    kind: Any = type(base)
    if kind.__name__ != "Linear4bit" or kind.__module__ != _FILE:
        return False
    return getattr(kind.forward, "__globals__", {}).get("__name__") == _FILE


def packed_weight(base: Any, given: torch.dtype, dtype: torch.dtype) -> PackedWeight | None:
    """The weight of such a Linear.

    None where the Linear does not multiply an input of ``given`` in ``dtype``, or its weight is not as
    bitsandbytes lays it out (on its way to a device, sharded, reordered for a CPU's kernels). Nor where the
    Linear has more to do: it casts a bias in place, and versions differ in how they unpack to a wider dtype.
    """
    weight, bias = base._parameters.get("weight"), base._parameters.get("bias")
    state = getattr(weight, "quant_state", None)
    # without a dtype of its own it takes that of its first input
    if state is None or dtype != (base.compute_dtype or given):
        return None
    if state.dtype not in (dtype, torch.float32) or (bias is not None and bias.dtype != dtype):
        return None
    shape: Any = torch.Size(state.shape)
    whole = shape == (base.out_features, base.in_features) and 2 * weight.nbytes == shape.numel()
    if not whole or getattr(state, "packing_format_for_cpu", False):
        return None
    # in memory of its own name: who gives the parameter other memory does not change this product's backward
    codes = weight.detach().view(-1, 1)
    return PackedWeight(partial(_unpack, codes, state), shape, dtype, weight.device)


def _unpack(codes: Tensor, state: Any) -> Tensor:
    """``[O, F]``, in the dtype of the weight that was packed.

    Args:
        codes: two in a byte, one below the other: a single row would be taken for the weight transposed.
        state: bitsandbytes' QuantState.
    """
    library: Any = sys.modules["bitsandbytes.functional"]
    with torch.no_grad():
        found: Tensor = library.dequantize_4bit(codes, state)
    return found
