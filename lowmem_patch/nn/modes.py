"""Torch function modes around foreign forwards, and what those do otherwise under them while a model trains.

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
from torch.overrides import TorchFunctionMode

from lowmem_patch.functional import EIGHT_BIT_DTYPES, gather, is_ordinary, packer, stored_attention
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.deferred import value_of
from lowmem_patch.nn.deferred_experts import GatheredRows
from lowmem_patch.nn.op import Arguments, Named
from lowmem_patch.nn.own import Own, give_forward_around, inner_forward
from lowmem_patch.tracing.call_arguments import (
    CalledFunction,
    are_row_numbers,
    called_function,
    gather_call,
)
from lowmem_patch.tracing.observers import FunctionObserver, eagerly
from lowmem_patch.tracing.op_roles import Role, names_with


class AroundForward(FunctionObserver):
    """Runs each call of a torch function in a module's forward by ``call(func, args, kwargs)``.

    Functions that torch.compile compiled run as they are written inside: the compiler would compile the mode
    into them, at which torch 2.12 fails.
    """

    def __enter__(self) -> Any:
        eagerly.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        eagerly.__exit__(*error)


def without_function_modes() -> Any:
    """A context in which tensors run torch functions as if they were ordinary, and no mode of this file sees
    that: each call that a mode sees takes longer than many kernels."""
    if torch._C._len_torch_function_stack() and not has_foreign_mode():
        return torch._C.DisableTorchFunction()
    return torch._C.DisableTorchFunctionSubclass()


def has_foreign_mode() -> bool:
    """Whether a torch function mode is on that is none of this file."""
    return not all(
        isinstance(torch._C._get_function_stack_at(place), AroundForward)
        for place in range(torch._C._len_torch_function_stack())
    )


class ForwardMode(AroundForward):
    """A mode that `run_under` makes anew for each forward of ``module``; further arguments are settings.

    Of several, torch asks the innermost alone, which asks the others by `onward`: each mode that torch asks
    takes time of every call.
    """

    names: frozenset[str]  # of the functions that `instead` may take
    _outer: ForwardMode | None = None
    _asked: frozenset[str]  # for which this mode or one around it is asked

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._packer = packer()

    def __enter__(self) -> Any:
        depth = torch._C._len_torch_function_stack()
        self._asked = self.names
        if depth and isinstance(torch._C._get_function_stack_at(depth - 1), ForwardMode):
            outer: ForwardMode = torch._C._pop_torch_function_stack()
            self._outer, self._asked = outer, self.names | outer._asked
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._outer is not None:
            torch._C._push_on_torch_function_stack(self._outer)
            self._outer = None

    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Named | None = None
    ) -> Any:
        # at once for all other functions, of which a forward may call a hundred
        if getattr(func, "__name__", "") in self._asked:
            return self.call(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in self.names:
            made = self.instead(func, args, kwargs)
            if made is not NotImplemented:
                return made
        return self.onward(func, args, kwargs)

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is given in the place of the function's result, or NotImplemented."""
        raise NotImplementedError

    def onward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function as the forward around this one calls it."""
        outer = self._outer
        return func(*args, **kwargs) if outer is None else outer.call(func, args, kwargs)

    def packs_alike(self) -> bool:
        """Whether nobody packs what is saved who did not when the forward began: a checkpoint inside of the
        module runs again without this mode, and must save the same both times."""
        packing: bool = packer() == self._packer
        return packing


def run_under(module: nn.Module, mode: type[ForwardMode], *settings: Any) -> None:
    """Let the module's forward run under ``mode(module, *settings)`` where gradients are recorded eagerly."""
    give_forward_around(module, under_mode, mode, settings)


def under_mode(
    module: nn.Module,
    mode: type[ForwardMode],
    settings: tuple[Any, ...],
    given: Own | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's forward as `run_under` sets it."""
    forward = inner_forward(module, given)
    if not (torch.is_grad_enabled() and is_ordinary()):
        return forward(*args, **kwargs)
    with mode(module, *settings):
        return forward(*args, **kwargs)


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


def is_in_weighted_part(module: nn.Module) -> bool:
    """Whether a part of the module that has weights, and no parts, is being called: what runs there, a hook
    on it say, is no function of the module's own forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            called = frame.f_locals["self"]
            return called is not module and bool(called._parameters) and not called._modules
        frame = frame.f_back
    return False


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
        known = func is F.scaled_dot_product_attention and torch.is_grad_enabled()
        if not known or not any(map(_trains, (*args, *kwargs.values()))):
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
        self.biases = [one for one in found if not is_foreign(one)]

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
        if call is None or is_foreign(call.tensor) or is_foreign(call.places):
            return NotImplemented
        return gather(*call) if call.tensor.requires_grad else NotImplemented


_GATHERS = (Tensor.gather, torch.gather)


class AttentionInGraph(TorchFunctionMode):
    """Inside, a compiled graph has `stored_attention` in the place of torch's function."""

    # a mode that the compiler follows: it keeps no state and knows of no thread
    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Named | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            args = tuple(map(value_of, args))
            kwargs = {name: value_of(value) for name, value in kwargs.items()}
            given = dict(zip(_STORED, args, strict=False)) | kwargs
            if all(_is_storable(given.get(name)) for name in _STORED):
                return stored_attention(*args, **kwargs)
        return func(*args, **kwargs)


_STORED = ("query", "key", "value")


def _is_storable(x: Any) -> bool:
    return not is_foreign(x) and x.dtype in EIGHT_BIT_DTYPES
