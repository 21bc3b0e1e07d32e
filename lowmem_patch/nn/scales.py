"""A Linear whose output is multiplied with a scale that trains: autograd saves no output for the scale.

A hook gives the Linear's output an op that knows what it was computed from. The product, wherever the forward
makes it, reads that; any other reader gets the output and sends its gradient to the Linear's own node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, scaled_linear
from lowmem_patch.nn.context import has_hooks, holds_weights, is_foreign, trains_here
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.op import Op
from lowmem_patch.nn.own import Own, multiplies_as_linear, runs_class_forward
from lowmem_patch.nn.stored import attach, keep
from lowmem_patch.tracing.call_arguments import moved_channel

# not float16, in which the product of a gradient and an input is as large as the gradient of what is scaled,
# and no complex numbers, of which the formulas would need the conjugates
_DTYPES = frozenset((torch.bfloat16, torch.float32, torch.float64))


def keep_for_scale(module: nn.Linear, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Forward hook of a Linear: its output times a scale saves what the Linear saves."""
    if not _is_known(module) or not holds_weights(module) or len(args) != 1:
        return None
    x, weight, bias = args[0], module.weight, module.bias
    if not (trains_here() and weight.requires_grad and output.requires_grad):
        return None
    if is_foreign(output) or is_foreign(weight) or output.dtype not in _DTYPES:
        return None
    sources = (x, weight) if bias is None else (x, weight, bias)
    op = Projected([source.requires_grad for source in sources])
    if in_compiler():
        return keep(output, op, sources)
    return attach(output, op, sources, watched=True)


def _is_known(module: nn.Module) -> bool:
    """Whether a Linear's output is the product of its input and weight: no other forward runs, and our hook
    sees it first. A parametrized Linear has another class, and may compute another weight each time."""
    if type(module) is not nn.Linear or has_hooks(module):
        return False
    if in_compiler():  # which knows no hook by its function
        return len(module._forward_hooks) == 1 and "forward" not in module.__dict__
    if not (runs_class_forward(module) and multiplies_as_linear(module)):
        return False
    first = next(iter(module._forward_hooks.values()), None)
    return isinstance(first, Own) and first.func is keep_for_scale


class Projected(Op):
    """The output of a Linear, whose sources are its input, weight and bias.

    Args:
        trains: whether each of the sources asked for a gradient when the Linear ran.
        channel: the dimension that the Linear's outputs are.
    """

    def __init__(self, trains: list[bool], channel: int = -1) -> None:
        self.trains, self.channel = trains, channel

    def rearranged(
        self, h: Deferred, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        channel = moved_channel(func.__name__, h, args[1:], kwargs) if self.channel == -1 else None
        if channel is None:
            return None
        moved = func(h.plain(), *args[1:], **kwargs)
        return keep(moved, Projected(self.trains, channel), h.sources)

    def times(self, h: Deferred, other: Any) -> Any:
        x, weight, *rest = h.sources
        found = _recipe(x, h.dtype)
        if found is None or not _scales(other, h, self.channel):
            return NotImplemented
        if [source.requires_grad for source in h.sources] != self.trains:
            return NotImplemented  # frozen or unfrozen since: the Linear's own node knows
        again, sources = found
        h.was_bypassed = True
        bias = rest[0] if rest else None
        return scaled_linear(
            h.detached(), value_of(other), value_of(x), again, sources, weight, bias, self.channel
        )


def _recipe(
    x: Tensor, dtype: torch.dtype
) -> tuple[Callable[..., Tensor] | None, tuple[Tensor, ...]] | None:
    """What gives a Linear's input again, and from which tensors, which autograd saves for the Linear; None
    where it saves something else."""
    if isinstance(x, Deferred) and not in_compiler():
        return None if x.is_changed() else x.op.recipe(x)
    known = x.dtype == dtype and (isinstance(x, Deferred) or not is_foreign(x))
    return (None, ()) if known else None


def _scales(scale: Any, h: Tensor, channel: int) -> bool:
    """Whether a tensor that trains has one number for all of ``h``, or for each channel."""
    if not isinstance(scale, Tensor) or not scale.requires_grad or is_foreign(value_of(scale)):
        return False
    if not scale.is_floating_point() or scale.dim() > h.dim():
        return False
    place = channel % h.dim() - (h.dim() - scale.dim())
    sizes = list(scale.shape)
    return scale.numel() == 1 or (place >= 0 and sizes[place] == scale.numel() == h.shape[channel])
