"""Ways to look at a forward while it runs: at calls of torch functions, of aten ops and of modules."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_untyped: Any = TorchDispatchMode
# torch's C++ asks a fake tensor for its device, five times an op: no op, and answered at once
_DEVICE = torch.ops.prim.device.default
# a Linear may end with one, and torch finds out anew at each that on fake tensors it is a view
_UNSAFE_VIEW, _VIEW = torch.ops.aten._unsafe_view.default, torch.ops.aten.view.default


class FunctionObserver(TorchFunctionMode):
    """Runs each call of a torch function by ``call(func, args, kwargs)``."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        return self.call(func, args, kwargs or {})


class _Eager:
    """Inside, functions that torch.compile compiled run as they are written; counted over all threads, which
    have one stance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                with contextlib.suppress(RuntimeError):  # torch refuses this in what it compiles
                    self._stance = torch.compiler.set_stance("force_eager")
            self._count += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._stance is not None:
                self._stance.__exit__(*error)
                self._stance = None


eagerly = _Eager()


class DispatchObserver(_untyped):  # type: ignore[misc]  # a base without types
    """Runs each aten op by ``call(func, args, kwargs)``, and each operator of higher order (flex attention).

    Nothing is compiled inside: under a dispatch mode torch.compile compiles no function, and would not
    compile later what was called there.
    """

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        eagerly.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        eagerly.__exit__(*error)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        if func is _UNSAFE_VIEW and type(args[0]) is FakeTensor:
            func = _VIEW
        return self.call(func, args, kwargs or {})


@contextlib.contextmanager
def observed_calls(
    model: nn.Module,
    enter: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[[str, nn.Module, Any], object],
    *,
    only_looks: bool = True,
) -> Iterator[None]:
    """Call ``enter(name, args, kwargs)`` and ``leave(name, module, output)`` around each call of a module,
    also one that fails; where it ``only_looks``, patched modules need not run as the originals do."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks

        def before(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            enter(name, args, kwargs)

        def after(module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            leave(name, module, output)

        before.__dict__["only_looks"] = after.__dict__["only_looks"] = only_looks
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def ended_checkpoints() -> Iterator[None]:
    """An exception ends the checkpoints of torch that it came through. Torch leaves their hooks on for as
    long as a frame of the exception lives, and takes off then whatever hooks were set last."""
    try:
        yield
    except BaseException as error:
        exception: BaseException | None = error
        while exception is not None:
            for frame, _ in traceback.walk_tb(exception.__traceback__):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
                    # a look at its variables has left a copy of them in the frame: this one renews the copy
                    dict(frame.f_locals)
            exception = exception.__context__
        raise
