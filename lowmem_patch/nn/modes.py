"""Torch function modes around foreign forwards while a model trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowmem_patch.functional import is_ordinary, packer
from lowmem_patch.nn.own import Own, give_forward_around, inner_forward
from lowmem_patch.tracing.observers import FunctionObserver, eagerly


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
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
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
