"""A LoRA layer's forward: its base Linear and its adapters as one op, on one copy of the input.

PEFT computes ``base(x) + B(A(x)) * scale`` in five modules' calls and eager steps: two more passes over the
output for the product, two for the scale, three for the sum, and in backward three more over the input's
gradient. Each layer gets a forward of its own that calls `lowmem_patch.functional.recast_linear` once. What
is not of this form (dropout, a hook on a part, a merged adapter) is left to the class's forward, on an
input of which no cast is saved.

The forward holds its layer (`lowmem_patch.nn.own`): copies and pickles take it along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, recast_linear, without_torch_function
from lowmem_patch.nn.context import autocast_dtype, is_foreign, is_fsdp_unit, trains_here
from lowmem_patch.nn.copies import cast_once, holds_casts
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_ops import Saved
from lowmem_patch.nn.low_rank import Products, low_rank_products
from lowmem_patch.nn.modes import without_function_modes
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import Own, give_forward
from lowmem_patch.nn.parameter_adapters import adapts_parameter, is_of_peft, read_factors
from lowmem_patch.nn.stored import project

# what the forward of PEFT's Linear looks up: one that looks up more computes more
_KNOWN = frozenset(
    (
        "VARIANT_KWARG_KEYS", "_cast_input_dtype", "_check_forward_args", "_mixed_batch_forward",
        "active_adapters", "base_layer", "disable_adapters", "dtype", "forward", "keys", "lora_A", "lora_B",
        "lora_dropout", "lora_variant", "merged", "pop", "scaling", "to", "unmerge", "weight",
    )
)  # fmt: skip
# and that of its Linear of 4 bits
_KNOWN_OF_FOUR_BITS = _KNOWN | {"clone", "is_autocast_enabled", "torch"}


def use_adapter(
    layer: nn.Module, low_precision: bool, alone: bool = False, shared: bool = False
) -> None:
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
        give_forward(layer, forward_kept, low_precision, alone)


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


def forward_kept(layer: Any, low_precision: bool, _alone: bool, *args: Any, **kwargs: Any) -> Any:
    """The class's forward, on an input of which autograd saves no copy in another dtype."""
    # of an input that needs no gradient (the first block's) the adapter would save a cast as well
    plain = args and trains_here() and not is_foreign(args[0])
    if plain and args[0].is_floating_point():
        args = (Saved().of(args[0], passing=True), *args[1:])
    forward = type(layer).forward
    if adapts_parameter(forward):
        return value_of(read_factors(layer, forward, *args, **kwargs))
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
    if one and _is_known(layer):
        x = args[0]
        # FSDP2's hook gives ordinary tensors, but not where a block runs again
        if is_fsdp_unit(layer):
            x = value_of(x)
        deferred = isinstance(x, Deferred)
        if deferred or _is_plain(x):
            with without_torch_function() if in_compiler() else without_function_modes():
                products = low_rank_products(layer, x.dtype, low_precision)
                if products is not None and not (deferred and x.is_changed()):
                    x = _cast_alone(x, products.dtype, shared) if alone else x
                    return _computed(x, shared, stored, products)
    return forward_kept(layer, low_precision, alone, *args, **kwargs)


def _is_plain(x: Any) -> bool:
    """Whether this is a floating tensor of torch's own kind."""
    return not is_foreign(x) and x.is_floating_point()


def _cast_alone(x: Tensor, dtype: torch.dtype, shared: bool) -> Tensor:
    """The cast of ``x`` with which autocast computes, where that is smaller, and no activation or norm gives
    it again. Beside others who would save a cast each, ``x`` itself is saved once."""
    if isinstance(x, Deferred) or not (in_compiler() or not shared or holds_casts()):
        return x
    low = autocast_dtype(x.device.type, x.dtype)
    smaller = low is not None and low.itemsize < x.dtype.itemsize
    return cast_once(x, dtype) if smaller else x


def _is_known(layer: nn.Module) -> bool:
    """Whether the class's forward is the known one still: somebody may have set another since."""
    return in_compiler() or adds_products(type(layer).forward)


def _computed(x: Tensor, shared: bool, stored: bool, products: Products) -> Tensor:
    to, dtype, returned, others = products
    y: Tensor = value_of(project(x, Projection(*to[:3], shared, stored), dtype))
    for lora_A, lora_B, scale in others:
        low = value_of(project(x, Projection(lora_A, None, stored=stored), dtype))
        product = recast_linear(low, lora_B, None, dtype)
        y = y + (product if scale == 1.0 else product * scale)
    return y if returned == dtype else y.to(returned)
