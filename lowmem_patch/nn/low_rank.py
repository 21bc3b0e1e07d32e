"""What a LoRA layer computes, read off its modules: a product and low-rank products, or something else.

A frozen base of 4 bits (QLoRA) is unpacked for each product. PEFT's layer runs bitsandbytes' Linear, copies
its result and adds the adapter's product to that: four more passes over the output, and two tensors of its
size for a while. The op adds the product where it lies.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.functional import LowRank, PackedWeight, is_ordinary
from lowmem_patch.nn.activations import PackedDropout
from lowmem_patch.nn.context import autocast_dtype, has_hooks, is_foreign, own_tensor
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import multiplies_as_linear, runs_class_forward

_FILE_OF_FOUR_BITS = "bitsandbytes.nn.modules"


class Products(NamedTuple):
    """What a layer computes.

    Attributes:
        to: the base Linear with the first adapter.
        dtype: of the products.
        returned: of the result.
        others: the other adapters.
    """

    to: Projection
    dtype: torch.dtype
    returned: torch.dtype
    others: list[LowRank]


def low_rank_products(layer: Any, given: torch.dtype, low_precision: bool) -> Products | None:
    """What a layer computes.

    None where the layer would compute anything else, or somebody looks at a part of it.
    """
    base = _plain_base(layer)
    if base is None:
        return None
    weight: Any = own_tensor(base, "weight")
    autocast = autocast_dtype(weight.device.type, given)
    dtype = given if autocast is None else autocast
    if type(base) is not nn.Linear:  # somebody may trace what unpacks it
        weight = packed_weight(base, given, dtype) if is_ordinary() else None
    elif is_foreign(weight):
        return None
    if weight is None or (autocast is None and weight.dtype != given):
        return None
    adapters = _adapters(layer, given, autocast, low_precision)
    if not adapters:
        return None
    to = Projection(weight, own_tensor(base, "bias"), adapters[0])
    # PEFT's layer of 4 bits returns the dtype of its input, also under autocast
    returned = given if isinstance(weight, PackedWeight) else dtype
    return Products(to, dtype, returned, adapters[1:])


def _adapters(
    layer: Any, given: torch.dtype, autocast: torch.dtype | None, low_precision: bool
) -> list[LowRank]:
    """The active adapters; none where one is more than two products, or has another dtype than the base."""
    tables = [layer._modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout")]
    adapters = []
    for name in layer.active_adapters:
        if name not in tables[0]:
            continue
        lora_A, lora_B, dropout = (table[name] for table in tables)
        adapter = _low_rank(lora_A, lora_B, dropout, layer.scaling[name])
        if adapter is None or name in layer.lora_variant:
            return []
        own = adapter.lora_A.dtype
        seen = own if getattr(layer, "cast_input_dtype_enabled", True) else given
        lowered = low_precision and given.itemsize < seen.itemsize
        alike = own == seen and (seen == given or lowered)
        if not (
            alike if autocast is None else seen != torch.float64
        ):  # which autocast leaves alone
            return []
        adapters.append(adapter)
    return adapters


def _plain_base(layer: Any) -> Any:
    """The base Linear, None where the layer computes more than products and sums."""
    # tables of modules and parameters, past nn.Module's search by name: this runs in each forward
    base = layer._modules["base_layer"]
    if _is_watched(base) or has_hooks(layer) or layer.disable_adapters or layer.merged:
        return None
    known = multiplies_as_linear(base) if type(base) is nn.Linear else is_four_bit(base)
    if not known:
        return None
    return None if own_tensor(base, "weight") is None else base


def _low_rank(
    lora_A: nn.Module, lora_B: nn.Module, dropout: nn.Module, scale: Any
) -> LowRank | None:
    """The adapter of these modules, None if it is more than two products."""
    first, second = _weight(lora_A), _weight(lora_B)
    if first is None or second is None or first.dtype != second.dtype:
        return None
    if not _is_identity(dropout) or not isinstance(scale, (int, float)):
        return None
    return LowRank(first, second, float(scale))


def _is_watched(part: nn.Module) -> bool:
    """Whether somebody may write into what this part sees, wait for its gradient, or run in its place."""
    hooks = (part._forward_hooks, part._forward_pre_hooks)
    return bool(
        ((hooks[0] or hooks[1]) and any(map(_may_write, (*hooks[0].values(), *hooks[1].values()))))
        or part._backward_hooks
        or part._backward_pre_hooks
        or ("forward" in part.__dict__ and not runs_class_forward(part))
    )


def _may_write(hook: Any) -> bool:
    """Whether a hook may do more than look: those of `saved_bytes` do not."""
    return not getattr(hook, "only_looks", False)


def _weight(part: nn.Module) -> Tensor | None:
    """The weight of A or B, None if it is more than a product."""
    if type(part) is not nn.Linear or own_tensor(part, "bias") is not None or _is_watched(part):
        return None
    weight: Tensor | None = own_tensor(part, "weight")
    return weight


def _is_identity(dropout: nn.Module) -> bool:
    if type(dropout) is nn.Identity:
        return not _is_watched(dropout)
    plain = type(dropout) in (nn.Dropout, PackedDropout) and not _is_watched(dropout)
    return plain and not (dropout.training and dropout.p)


def is_four_bit(base: nn.Module) -> bool:
    """Whether this is bitsandbytes' Linear of 4 bits, whose class has its own forward still."""
    kind: Any = type(base)
    if kind.__name__ != "Linear4bit" or kind.__module__ != _FILE_OF_FOUR_BITS:
        return False
    return getattr(kind.forward, "__globals__", {}).get("__name__") == _FILE_OF_FOUR_BITS


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
