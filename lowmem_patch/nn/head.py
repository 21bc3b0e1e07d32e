"""The forward of a head: logits that wait to be read (`lowmem_patch.nn.logits`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import PackedWeight, in_compiler, recast_linear, without_torch_function
from lowmem_patch.nn import logits_readers as logits_readers  # fills the table of readers
from lowmem_patch.nn.adapters import forward_as_one
from lowmem_patch.nn.context import (
    has_hooks,
    holds_weights,
    is_foreign,
    product_dtype,
    to_save,
    trains_here,
)
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_ops import Saved
from lowmem_patch.nn.logits import HeadReads, Logits, Settings
from lowmem_patch.nn.low_rank import low_rank_products
from lowmem_patch.nn.op import Projection
from lowmem_patch.nn.own import give_forward, given_forward, is_own, multiplies_as_linear
from lowmem_patch.nn.trained_weights import TrainedWeights
from lowmem_patch.nn.watched import unwatched

FREED = "its weight is freed after its own forward"
OTHER_FORWARD = "its class has another forward since the patch"


def defer_logits(module: nn.Module, low_precision: bool | None) -> None:
    """Give a head a forward that returns logits which nobody has computed.

    Args:
        module: an nn.Linear, or a LoRA layer of one.
        low_precision: of a LoRA layer, as of `lowmem_patch.nn.adapters.use_adapter`; None for a Linear.
    """
    give_forward(module, forward_head, HeadReads(), low_precision)


def forward_head(
    module: Any, reads: HeadReads, low_precision: bool | None, *args: Any, **kwargs: Any
) -> Any:
    """Deferred logits where gradients are recorded, and the class's forward where not."""
    if len(args) == 1 and not kwargs and _waits(module, reads, args[0]):
        with without_torch_function():
            found = _deferred(module, reads, low_precision, args[0])
        if found is not None:
            return found
    if low_precision is None:
        return type(module).forward(module, *args, **kwargs)
    return forward_as_one(module, low_precision, False, False, *args, **kwargs)


def _waits(module: nn.Module, reads: HeadReads, x: Any) -> bool:
    if not trains_here() or has_hooks(module):
        return False
    if (is_foreign(x) and not isinstance(x, Deferred)) or not x.dim():
        return False
    if not holds_weights(module):
        reads.not_deferred = FREED
        return False
    return True


def _deferred(
    module: Any, reads: HeadReads, low_precision: bool | None, x: Tensor
) -> Deferred | None:
    if low_precision is None and not multiplies_as_linear(module):
        reads.not_deferred = OTHER_FORWARD
        return None
    product = _product(module, low_precision, x.dtype)
    if product is None:
        return None
    (weight, bias, adapter, *_), dtype = product
    if is_foreign(weight):
        reads.not_deferred = f"its weight is a {type(weight).__name__}"
        return None
    if x.device != weight.device or x.shape[-1] != weight.shape[-1]:
        return None  # torch's own error
    x = _saved(x)
    sources = [x, weight] if bias is None else [x, weight, bias]
    if adapter is not None:
        low = recast_linear(x, adapter.lora_A, None, dtype)
        sources += [low if adapter.scale == 1 else low * adapter.scale, adapter.lora_B]
    if not any(source.requires_grad for source in sources):
        return None
    settings = Settings(dtype, dtype, bias=bias is not None, adapter=adapter is not None)
    if in_compiler():
        return Logits(reads, settings).of(tuple(sources))
    weights = TrainedWeights()
    sources = [_as_it_trains(source, weights) for source in sources]
    return Logits(reads, settings, weights).of(tuple(sources))


def _as_it_trains(source: Tensor, weights: TrainedWeights) -> Tensor:
    """``source`` for readers that come later: its gradient is decided here, where the head runs. PEFT's
    ``disable_adapter()``, in which a loss of DPO is computed, freezes adapters meanwhile."""
    if source.grad_fn is not None:
        return unwatched(source)  # a compiled function may be given the logits, and reads it
    if not source.requires_grad:
        return source.detach()
    trained = source.view_as(source)
    weights.add(trained)
    return trained


def _product(
    module: Any, low_precision: bool | None, given: torch.dtype
) -> tuple[Projection, torch.dtype] | None:
    """What the module multiplies an input of dtype ``given`` with, and in which dtype; None where it does
    more than that, or torch raises an error."""
    if low_precision is not None:
        products = low_rank_products(module, given, low_precision)
        if products is None or products.others or isinstance(products.to.weight, PackedWeight):
            return None
        return products.to, products.dtype
    weight = module.weight  # which a replica of nn.DataParallel has as an attribute
    dtype = product_dtype(given, weight)
    return None if dtype is None else (Projection(to_save(weight, dtype), module.bias), dtype)


def _saved(x: Tensor) -> Tensor:
    """The input as autograd saves it anyway."""
    if isinstance(x, Deferred) and isinstance(x.op, Saved) and not x.is_changed():
        return x.op.saved_as(x)
    value: Tensor = value_of(x)
    return value


def notes_of_heads(model: nn.Module) -> list[str]:
    """What a report says of the heads' logits since the patch."""
    notes = []
    for name, reads in _reads_of_heads(model):
        if reads.whole:
            asked = ", ".join(reads.whole)
            times = sum(reads.whole.values())
            often = "once" if times == 1 else f"{times} times"
            notes.append(f"{name}: logits were computed whole {often}, for {asked}")
        if reads.not_deferred:
            notes.append(f"{name}: logits are computed at once, since {reads.not_deferred}")
    return notes


def forget_reads(model: nn.Module) -> None:
    """Count from now on who reads logits whole."""
    for _, reads in _reads_of_heads(model):
        reads.whole.clear()


def _reads_of_heads(model: nn.Module) -> Iterator[tuple[str, HeadReads]]:
    for name, module in model.named_modules():
        # offloading puts it aside, too
        slots = (given_forward(module), module.__dict__.get("_old_forward"))
        forward = next((found for found in slots if is_own(found)), None)
        if forward is not None and forward.func is forward_head:
            yield name, forward.args[1]
