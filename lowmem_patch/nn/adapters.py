"""A LoRA layer's forward: its base Linear and its adapters as one op, on one copy of the input.

PEFT computes ``base(x) + B(A(x)) * scale`` in five modules' calls and eager steps: two more passes over the
output for the product, two for the scale, three for the sum, and in backward three more over the input's
gradient. Each layer gets a forward of its own that calls `lowmem_patch.functional.recast_linear` once. What
is not of this form (dropout, a hook on a part, a merged adapter) is left to the class's forward, on an
input of which no cast is saved.

The forward holds its layer (`lowmem_patch.nn.own`): copies and pickles take it along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import LowRank, in_compiler, is_exporting, recast_linear
from lowmem_patch.nn.context import autocast_dtype, has_hooks, is_foreign
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_linears import project
from lowmem_patch.nn.deferred_ops import Saved
from lowmem_patch.nn.dropout import PackedDropout
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import Own, give_forward, given_forward, runs_class_forward
from lowmem_patch.nn.parameter_adapters import adapts_parameter, is_of_peft, read_factors
from lowmem_patch.nn.siblings import Siblings

# the base Linear with the first adapter, the dtype of the product, and the other adapters
Products = tuple[Projection, torch.dtype, list[LowRank]]
_WITHOUT_TORCH_FUNCTION: Any = torch._C.DisableTorchFunctionSubclass
# what the forward of PEFT's Linear looks up: one that looks up more computes more
_KNOWN = frozenset(
    (
        "VARIANT_KWARG_KEYS", "_cast_input_dtype", "_check_forward_args", "_mixed_batch_forward",
        "active_adapters", "base_layer", "disable_adapters", "dtype", "forward", "keys", "lora_A", "lora_B",
        "lora_dropout", "lora_variant", "merged", "pop", "scaling", "to", "unmerge", "weight",
    )
)  # fmt: skip


def use_adapter(
    layer: nn.Module,
    low_precision: bool,
    alone: bool = False,
    siblings: Sequence[nn.Module] = (),
) -> None:
    """Give a LoRA layer a forward that saves one copy of its input.

    Args:
        layer: a LoRA layer of a Linear, or of a parameter.
        low_precision: adapters wider than the input are computed in the input's dtype.
        alone: nobody else saves the input: the copy is in autocast's dtype, where no dropout is active.
        siblings: the layers that read the same input, this one among them, in the order of their calls.
    """
    if not adds_products(type(layer).forward):
        give_forward(layer, forward_kept, low_precision, alone)
        return
    known = filter(None, map(siblings_of, siblings))
    group = next(known, None) or (Siblings(siblings) if siblings else None)
    give_forward(layer, forward_as_one, low_precision, alone, group)


def siblings_of(layer: nn.Module) -> Siblings | None:
    """The layers that one op may compute with this one; None where it runs by itself."""
    forward = _forward_as_one_of(layer)
    found: Siblings | None = None if forward is None else forward.args[3]
    return found


def _forward_as_one_of(layer: nn.Module) -> Own | None:
    """What `use_adapter` gave, also beneath a forward that looks at nothing but what is saved."""
    forward = given_forward(layer)
    if isinstance(forward, Own) and getattr(forward.func, "looks_at_saved", False):
        forward = forward.args[1]
    return forward if isinstance(forward, Own) and forward.func is forward_as_one else None


def is_adapter_forward(forward: Any) -> bool:
    """Whether this is what :func:`use_adapter` gives, also where another forward of ours is around it."""
    while isinstance(forward, Own):
        if forward.func in (forward_as_one, forward_kept):
            return True
        forward = next((inner for inner in forward.args if isinstance(inner, Own)), None)
    return False


def adds_products(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward is the one that `forward_as_one` stands for, told by what it looks up."""
    return is_of_peft(forward, "Linear.forward", _KNOWN)


def forward_kept(layer: Any, low_precision: bool, _alone: bool, *args: Any, **kwargs: Any) -> Any:
    """The class's forward, on an input of which autograd saves no copy in another dtype."""
    # of an input that needs no gradient (the first block's) the adapter would save a cast as well
    plain = args and torch.is_grad_enabled() and not is_exporting() and not is_foreign(args[0])
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
    siblings: Siblings | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The base Linear and every active adapter as one op, where that is what the class's forward computes."""
    one = len(args) == 1 and not kwargs and torch.is_grad_enabled() and not is_exporting()
    if one and _is_known(layer):
        x = args[0]
        deferred = isinstance(x, Deferred)
        if deferred or (not is_foreign(x) and x.is_floating_point()):
            with _WITHOUT_TORCH_FUNCTION():
                products = low_rank_products(layer, x.dtype, low_precision)
                if products is not None and not (deferred and x.is_changed()):
                    y = None
                    if siblings is not None:
                        y = _with_siblings(siblings, layer, x, products)
                    return _computed(x, alone, *products) if y is None else y
    return forward_kept(layer, low_precision, alone, *args, **kwargs)


def _with_siblings(
    siblings: Siblings, layer: nn.Module, x: Tensor, products: Products
) -> Tensor | None:
    """The layer's output, where it and the layers that read the same input run as one op."""

    def read(other: nn.Module) -> tuple[Projection, torch.dtype] | None:
        forward = _forward_as_one_of(other)
        if forward is None or forward.args[3] is not siblings or not _is_known(other):
            return None
        found = low_rank_products(other, x.dtype, forward.args[1])
        return None if found is None or found[2] else found[:2]

    to, dtype, rest = products
    return None if rest else siblings.output(layer, x, to, dtype, read)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast computes with a smaller copy of this, which no activation or norm computes again."""
    if isinstance(x, Deferred):
        return False
    low = autocast_dtype(x.device.type, x.dtype)
    return low is not None and low.itemsize < x.dtype.itemsize


def _is_known(layer: nn.Module) -> bool:
    """Whether the class's forward is the known one still: somebody may have set another since."""
    return in_compiler() or adds_products(type(layer).forward)


def _computed(
    x: Tensor, alone: bool, to: Projection, dtype: torch.dtype, rest: list[LowRank]
) -> Tensor:
    if alone and _is_cast(x):
        x = x.to(dtype)
    y: Tensor = value_of(project(x, to, dtype))
    for lora_A, lora_B, scale in rest:
        low = value_of(project(x, Projection(lora_A, None), dtype))
        product = recast_linear(low, lora_B, None, dtype)
        y = y + (product if scale == 1.0 else product * scale)
    return y


def low_rank_products(layer: Any, given: torch.dtype, low_precision: bool) -> Products | None:
    """What a layer computes.

    None where the layer would compute anything else, or somebody looks at a part of it.
    """
    base = _plain_base(layer)
    if base is None:
        return None
    weight: Tensor = base["weight"]
    autocast = autocast_dtype(weight.device.type, given)
    if autocast is None and weight.dtype != given:
        return None
    tables = [layer._modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout")]
    adapters = []
    for name in layer.active_adapters:
        if name not in tables[0]:
            continue
        lora_A, lora_B, dropout = (table[name] for table in tables)
        adapter = _low_rank(lora_A, lora_B, dropout, layer.scaling[name])
        if adapter is None or name in layer.lora_variant:
            return None
        own = adapter.lora_A.dtype
        seen = own if getattr(layer, "cast_input_dtype_enabled", True) else given
        if not _has_dtype_of_base(given, autocast, seen, own, low_precision):
            return None
        adapters.append(adapter)
    if not adapters:
        return None
    to = Projection(weight, base.get("bias"), adapters[0])
    return to, given if autocast is None else autocast, adapters[1:]


def _plain_base(layer: Any) -> dict[str, Any] | None:
    """The parameters of the base Linear, None where the layer computes more than products and sums."""
    # tables of modules and parameters, past nn.Module's search by name: this runs in each forward
    base = layer._modules["base_layer"]
    if type(base) is not nn.Linear or _is_watched(base) or has_hooks(layer):
        return None
    if layer.disable_adapters or layer.merged:
        return None
    parameters: dict[str, Any] = base._parameters
    weight = parameters.get("weight")
    return None if weight is None or is_foreign(weight) else parameters


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
    parameters = part._parameters
    if type(part) is not nn.Linear or parameters.get("bias") is not None or _is_watched(part):
        return None
    return parameters.get("weight")


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
