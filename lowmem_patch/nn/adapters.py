"""A LoRA layer's forward: its base Linear and its adapters as one op, on one copy of the input.

PEFT computes ``base(x) + B(A(x)) * scale`` in five modules' calls and eager steps: two more passes over the
output for the product, two for the scale, three for the sum, and in backward three more over the input's
gradient. Each layer gets a forward of its own that calls `lowmem_patch.functional.recast_linear` once. What
is not of this form (dropout, a hook on a part, a merged adapter) is left to the class's forward, on an
input of which no cast is saved.

Of an adapter of a parameter, as of the weights of experts, the module reads W + s L R, which is not made.
PEFT gives the module a parametrization for each forward. Here it finds a deferred tensor in the place of its
parameter for that time (`lowmem_patch.nn.deferred_experts.AdaptedWeight`), or the sum, where no gradient is
wanted. What is not one adapter of a floating parameter is left to PEFT's forward, but not evaluations: PEFT's
parametrization sets the parameter to itself, which torch counts as a write, and a training forward before the
evaluation has saved that parameter for its backward.

A forward holds its layer (`lowmem_patch.nn.own`): copies and pickles take it along.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, is_ordinary, recast_linear, without_torch_function
from lowmem_patch.nn.context import autocast_dtype, is_foreign, is_fsdp_unit, trains_here
from lowmem_patch.nn.copies import cast_once, holds_casts
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_experts import AdaptedWeight
from lowmem_patch.nn.deferred_ops import Saved
from lowmem_patch.nn.low_rank import Products, low_rank_products
from lowmem_patch.nn.modes import without_function_modes
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import Own, give_forward
from lowmem_patch.nn.stored import project

# what the forward of PEFT's Linear looks up: one that looks up more computes more
_KNOWN = frozenset((
    "VARIANT_KWARG_KEYS", "_cast_input_dtype", "_check_forward_args", "_mixed_batch_forward",
    "active_adapters", "base_layer", "disable_adapters", "dtype", "forward", "keys", "lora_A", "lora_B",
    "lora_dropout", "lora_variant", "merged", "pop", "scaling", "to", "unmerge", "weight",
))  # fmt: skip
# and that of its Linear of 4 bits
_KNOWN_OF_FOUR_BITS = _KNOWN | {"clone", "is_autocast_enabled", "torch"}
# and that of its ParamWrapper
_KNOWN_OF_PARAMETERS = frozenset((
    "ValueError", "__class__", "__name__", "_activate_lora", "_check_forward_args", "active_adapters",
    "base_layer", "disable_adapters", "merged", "pop", "unmerge",
))  # fmt: skip
_trains: Callable[[Tensor], bool] = attrgetter("requires_grad")
# of parameters with an adapter
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ROW = 16  # bytes, of which torch's grouped_mm asks for a multiple


def use_adapter(layer: nn.Module, low_precision: bool, alone: bool, shared: bool) -> None:
    """Give a LoRA layer a forward that saves one copy of its input.

    Args:
        layer: a LoRA layer of a Linear, or of a parameter.
        low_precision: adapters wider than the input are computed in the input's dtype.
        alone: no one but such layers saves the input: they save one copy in autocast's dtype, where no
            dropout is active.
        shared: other LoRA layers read the input as well.
    """
    if adds_products(type(layer).forward):
        give_forward(layer, forward_as_one, low_precision, alone, shared)
    else:
        give_forward(layer, forward_kept, low_precision)


def is_adapter_forward(forward: Any) -> bool:
    """Whether this is what :func:`use_adapter` gives, also where another forward of ours is around it."""
    while isinstance(forward, Own):
        if forward.func in (forward_as_one, forward_kept):
            return True
        forward = next((inner for inner in forward.args if isinstance(inner, Own)), None)
    return False


def adds_products(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward is the one that `forward_as_one` stands for, told by what it looks up."""
    if is_of_peft(forward, "Linear.forward", _KNOWN):
        return True
    return is_of_peft(forward, "Linear4bit.forward", _KNOWN_OF_FOUR_BITS, "bnb")


def adapts_parameter(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward is that of PEFT's ParamWrapper, told by what it looks up."""
    return is_of_peft(forward, "ParamWrapper.forward", _KNOWN_OF_PARAMETERS)


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


def forward_kept(layer: Any, low_precision: bool, *args: Any, **kwargs: Any) -> Any:
    """The class's forward, on an input of which autograd saves no copy in another dtype."""
    # of an input that needs no gradient (the first block's) the adapter would save a cast as well
    plain = args and trains_here() and not is_foreign(args[0])
    if plain and args[0].is_floating_point():
        args = (Saved().of(args[0], passing=True), *args[1:])
    forward = type(layer).forward
    if adapts_parameter(forward):
        return value_of(read_factors(layer, *args, **kwargs))
    x = args[0] if args and isinstance(args[0], Deferred) else None
    if x is None or not low_precision:
        return value_of(forward(layer, *args, **kwargs))
    x._adapts = True
    try:
        return value_of(forward(layer, *args, **kwargs))
    finally:
        x._adapts = False


def forward_as_one(
    layer: Any,
    low_precision: bool,
    alone: bool,
    shared: bool,
    *args: Any,
    stored: bool = False,
    **kwargs: Any,
) -> Any:
    """The base Linear and every active adapter as one op, where that is what the class's forward computes.

    ``stored``: as of a `Projection`.
    """
    one = len(args) == 1 and not kwargs and trains_here()
    # somebody may have set another forward of the class since
    if one and (in_compiler() or adds_products(type(layer).forward)):
        x = args[0]
        # FSDP2's hook gives ordinary tensors, but not where a block runs again
        if is_fsdp_unit(layer):
            x = value_of(x)
        deferred = isinstance(x, Deferred)
        if deferred or (not is_foreign(x) and x.is_floating_point()):
            with without_torch_function() if in_compiler() else without_function_modes():
                products = low_rank_products(layer, x.dtype, low_precision)
                if products is not None and not (deferred and x.is_changed()):
                    x = _cast_alone(x, products.dtype, shared) if alone else x
                    return _computed(x, shared, stored, products)
    return forward_kept(layer, low_precision, *args, **kwargs)


def _cast_alone(x: Tensor, dtype: torch.dtype, shared: bool) -> Tensor:
    """The cast of ``x`` with which autocast computes, where that is smaller, and no activation or norm gives
    it again. Beside others who would save a cast each, ``x`` itself is saved once."""
    if isinstance(x, Deferred) or not (in_compiler() or not shared or holds_casts()):
        return x
    low = autocast_dtype(x.device.type, x.dtype)
    smaller = low is not None and low.itemsize < x.dtype.itemsize
    return cast_once(x, dtype) if smaller else x


def _computed(x: Tensor, shared: bool, stored: bool, products: Products) -> Tensor:
    to, dtype, returned, others = products
    y: Tensor = value_of(project(x, Projection(*to[:3], shared, stored), dtype))
    for lora_A, lora_B, scale in others:
        low = value_of(project(x, Projection(lora_A, None, stored=stored), dtype))
        product = recast_linear(low, lora_B, None, dtype)
        y = y + (product if scale == 1.0 else product * scale)
    return y if returned == dtype else y.to(returned)


def read_factors(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a ParamWrapper's base, which finds the adapted weight in the place of its parameter; the
    class's forward, where more is to compute."""
    serves = is_ordinary() or (trains_here() and not in_compiler())
    weight = _adapted_weight(layer) if serves and "adapter_names" not in kwargs else None
    if weight is None:
        return type(layer).forward(layer, *args, **kwargs)
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
    trains = torch.is_grad_enabled() and any(map(_trains, (weight, lora_A, lora_B)))
    if trains and not lora_A.requires_grad:
        return None
    factors = _factors(layer, weight, lora_A, lora_B)
    if factors is None:
        return None
    op = AdaptedWeight(layer.scaling[names[0]])
    return defer(op, factors) if trains else op.compute(*factors)


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
