"""PEFT's adapter of a parameter, as of the weights of experts: the module reads W + s L R, which is not made.

PEFT gives the module a parametrization for each forward. Here the module finds a deferred tensor in the place
of its parameter for that time (`lowmem_patch.nn.deferred_experts.AdaptedWeight`). Where no gradient is wanted
it finds the sum. What is not one adapter of a floating parameter is left to PEFT's forward.

Evaluations are not left to PEFT: its parametrization sets the parameter to itself, which torch counts as a
write. A training forward before the evaluation has saved that parameter for its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, is_ordinary
from lowmem_patch.nn.context import is_foreign, trains_here
from lowmem_patch.nn.deferred import defer
from lowmem_patch.nn.deferred_experts import AdaptedWeight

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ROW = 16  # bytes, of which torch's grouped_mm asks for a multiple
# what the forward of PEFT's ParamWrapper looks up: one that looks up more computes more
_KNOWN = frozenset(
    (
        "ValueError", "__class__", "__name__", "_activate_lora", "_check_forward_args", "active_adapters",
        "base_layer", "disable_adapters", "merged", "pop", "unmerge",
    )
)  # fmt: skip


def adapts_parameter(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward is that of PEFT's ParamWrapper, told by what it looks up."""
    return is_of_peft(forward, "ParamWrapper.forward", _KNOWN)


def is_of_peft(
    forward: Callable[..., Any], name: str, known: frozenset[str], of_file: str = "layer"
) -> bool:
    """Whether a function is the one of this name in a file of PEFT's LoRA layers, and looks up no more than
    is ``known``."""
    # not by the function's own names, which a functools.wraps around it takes over
    code: Any = getattr(forward, "__code__", None)
    file = getattr(forward, "__globals__", {}).get("__name__")
    if file != f"peft.tuners.lora.{of_file}" or code.co_qualname != name:
        return False
    return known.issuperset(code.co_names)


def read_factors(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of the base, which finds the adapted weight in the place of its parameter.

    Args:
        layer: a ParamWrapper.
        call: its class's forward, which is called where more is to compute.
    """
    serves = is_ordinary() or (trains_here() and not in_compiler())
    weight = _adapted_weight(layer) if serves and "adapter_names" not in kwargs else None
    if weight is None:
        return call(layer, *args, **kwargs)
    attributes = vars(layer.get_base_layer())
    # nn.Module looks for parameters behind its attributes
    attributes[layer.parameter_name] = weight
    try:
        return layer.base_layer(*args, **kwargs)
    finally:
        del attributes[layer.parameter_name]


def _adapted_weight(layer: Any) -> Tensor | None:
    """The weight with its adapter, deferred where it has a gradient; None where this is left to PEFT."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1:
        return None
    lora_A, lora_B = (table[names[0]].weight for table in (layer.lora_A, layer.lora_B))
    weight = _plain_parameter(layer.get_base_layer(), layer.parameter_name)
    if weight is None or is_foreign(lora_A) or is_foreign(lora_B):
        return None
    trains = torch.is_grad_enabled() and _train(weight, lora_A, lora_B)
    if trains and not lora_A.requires_grad:
        return None
    factors = _factors(layer, weight, lora_A, lora_B)
    if factors is None:
        return None
    op = AdaptedWeight(layer.scaling[names[0]])
    return defer(op, factors) if trains else op.compute(*factors)


def _train(*tensors: Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _plain_parameter(base: nn.Module, name: str) -> Tensor | None:
    """A floating parameter, None where it is sharded, quantised, or not where the module keeps its own."""
    weight = base._parameters.get(name)
    known = name not in vars(base) and not is_foreign(weight)
    return weight if known and weight is not None and weight.dtype in _DTYPES else None


def _factors(
    layer: Any, weight: Tensor, lora_A: Tensor, lora_B: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """W, L and R. PEFT's A of several experts is ``[E r, F]``, its B ``[O, r E]``."""
    experts = layer.num_experts
    if weight.dim() == 2 and experts == 1:  # [O, F], as a Linear's
        left, right = lora_B, lora_A
    elif weight.dim() == 3 and experts == weight.shape[0] > 1:
        right = lora_A.reshape(experts, -1, lora_A.shape[-1])
        left = lora_B.reshape(lora_B.shape[0], -1, experts).permute(2, 0, 1)
        if not layer._did_swap_in_out_features:  # [E, F, O], not [E, O, F]
            left, right = right.mT, left.mT
    else:
        return None
    left, right = (factor.to(weight.dtype) for factor in (left, right))
    missing = -left.shape[-1] % (_ROW // weight.itemsize) if weight.dim() == 3 else 0
    if missing:
        left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
    return weight, left.contiguous(), right.contiguous()
