"""What a module's forward does otherwise while it trains, as modes for `run_under`.

A mode looks at each torch function that is called meanwhile, which costs time at each. So it runs around the
module that calls the function in question, and around no larger one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch.functional import gather
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.deferred_rows import GatheredRows
from lowmem_patch.nn.modes import ForwardMode
from lowmem_patch.tracing.call_arguments import (
    CalledFunction,
    GatherCall,
    are_row_numbers,
    called_function,
    gather_call,
)
from lowmem_patch.tracing.op_roles import Role, names_with


class CallInstead(ForwardMode):
    """Calls ``replacement`` where the forward of ``module`` calls ``function``.

    What the modules inside of that one call is theirs.
    """

    def __init__(
        self, module: nn.Module, function: CalledFunction, replacement: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(module)
        self.function = function
        self.names = frozenset((function.name,))
        self.replacement = replacement

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.packs_alike():
            return NotImplemented
        read = called_function(self.function.name, args, kwargs)
        if read is None or read[1] != self.function or not is_running(self.module):
            return NotImplemented
        return self.replacement(read[0])


_CALL = nn.Module._call_impl.__code__


def is_running(module: nn.Module) -> bool:
    """Whether no module inside of this one is being called; what the forward makes by itself is its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            called = frame.f_locals["self"]
            if called is module or any(called is inside for inside in module.modules()):
                return called is module
        frame = frame.f_back
    return True


class HeadsLastQueries(ForwardMode):
    """Gives fused attention queries whose memory holds the heads behind the tokens.

    Its kernels give their output in the memory order of q. The Linear behind attention reads the output with
    the heads of a token side by side. Where q holds the heads in front of the tokens, that is another order:
    the output is copied for the Linear, which saves the copy beside the output that attention saves. Here q
    is copied into the Linear's order instead. The values are the same, and autograd saves one tensor less.
    Where a kernel does not follow q, the copy of q is of no use, and nothing else changes.
    """

    names = names_with(Role.FUSED_ATTENTION)

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return NotImplemented
        if not any(map(_trains, (*args, *kwargs.values()))):
            return NotImplemented
        if args:
            return self.onward(func, (_with_heads_last(args[0]), *args[1:]), kwargs)
        return self.onward(func, (), {**kwargs, "query": _with_heads_last(kwargs.get("query"))})


def has_heads_first(tensor: Tensor) -> bool:
    """Whether ``[B, H, S, D]`` lies in memory with the tokens of a head side by side."""
    if tensor.dim() != 4 or tensor.shape[1] == 1 or tensor.shape[2] == 1:
        return False
    return tensor.stride(1) > tensor.stride(2)


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _with_heads_last(q: Any) -> Any:
    if is_foreign(q) or q.layout is not torch.strided or q.is_nested or not has_heads_first(q):
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)


class GatherBiases(ForwardMode):
    """Gathers rows of parameters as `GatheredRows`: what a product saves in the place of an expert's bias,
    gathered for its rows, is the bias."""

    names = names_with(Role.INDEX)

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(module)
        found = (getattr(module, name, None) for name in names)
        self.biases = [one for one in found if isinstance(one, Tensor) and not is_foreign(one)]

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = func is Tensor.__getitem__ and any(args[0] is bias for bias in self.biases)
        if not (known and are_row_numbers(args[1]) and self.packs_alike()):
            return NotImplemented
        return GatheredRows.of(*args)


class GatherUnsaved(ForwardMode):
    """Saves no tensor of which the module gathers numbers."""

    names = names_with(Role.GATHER)

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = gather_call(args, kwargs) if func in _GATHERS and self.packs_alike() else None
        return NotImplemented if call is None or not _is_plain(call) else gather(*call)


_GATHERS = (Tensor.gather, torch.gather)


def _is_plain(call: GatherCall) -> bool:
    return call.tensor.requires_grad and not (is_foreign(call.tensor) or is_foreign(call.places))
