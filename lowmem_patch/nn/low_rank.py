"""What a LoRA layer computes, read off its modules: a product and low-rank products, or something else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.functional import LowRank, PackedWeight, is_ordinary
from lowmem_patch.nn.context import autocast_dtype, has_hooks, is_foreign, own_tensor
from lowmem_patch.nn.dropout import PackedDropout
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import runs_class_forward
from lowmem_patch.nn.packed_weights import is_four_bit, packed_weight


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
    autocast = autocast_dtype(own_tensor(base, "weight").device.type, given)
    dtype = given if autocast is None else autocast
    weight = _weight_of(base, given, dtype)
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
        if not _has_dtype_of_base(given, autocast, seen, own, low_precision):
            return []
        adapters.append(adapter)
    return adapters


def _plain_base(layer: Any) -> Any:
    """The base Linear, None where the layer computes more than products and sums."""
    # tables of modules and parameters, past nn.Module's search by name: this runs in each forward
    base = layer._modules["base_layer"]
    if _is_watched(base) or has_hooks(layer) or layer.disable_adapters or layer.merged:
        return None
    if type(base) is not nn.Linear and not is_four_bit(base):
        return None
    return None if own_tensor(base, "weight") is None else base


def _weight_of(base: Any, given: torch.dtype, dtype: torch.dtype) -> Tensor | PackedWeight | None:
    """The weight that a base multiplies an input of ``given`` with in ``dtype``; None where it is sharded, or
    somebody traces what unpacks it."""
    if type(base) is not nn.Linear:
        return packed_weight(base, given, dtype) if is_ordinary() else None
    weight: Any = own_tensor(base, "weight")
    found: Tensor | None = None if is_foreign(weight) else weight
    return found


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
    """Whether a dropout gives what it is given."""
    if type(dropout) is nn.Identity:
        return not _is_watched(dropout)
    plain = type(dropout) in (nn.Dropout, PackedDropout) and not _is_watched(dropout)
    return plain and not (dropout.training and dropout.p)


def _has_dtype_of_base(
    given: torch.dtype,
    autocast: torch.dtype | None,
    seen: torch.dtype,
    own: torch.dtype,
    low_precision: bool,
) -> bool:
    """Whether an adapter's product has the dtype of the base's.

    Args:
        given: of the layer's input.
        autocast: in which autocast computes both.
        seen: of the input as A gets it.
        own: of A.
        low_precision: as of the layer.
    """
    if autocast is not None:
        return seen != torch.float64  # autocast leaves that alone
    return own == seen and (seen == given or (low_precision and given.itemsize < seen.itemsize))
