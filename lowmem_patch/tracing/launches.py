"""Triton kernels under fake tensors: a launch runs nothing, and is seen as a request for addresses.

A kernel allocates nothing. It writes into what torch's own ops have made, so that shapes and saved bytes are
known without it. Kernels in C++ that make their own outputs are none of these.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # has no types
# arguments of kernels that hold no tensor, as functions that are part of a kernel
_PLAIN = (NoneType, bool, int, float, str, torch.dtype, torch.device, FunctionType)
# whether the address that is asked for here is that of a launch that runs nothing
is_skipped: ContextVar[bool] = ContextVar("is_skipped", default=False)


def _skip(mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a launch does under a fake mode.

    Raises:
        RuntimeError: among the arguments is a tensor with data, into which the kernel would write, or
            something that may hold one.
    """
    tensors = list(_tensors((args, kwargs)))
    token = is_skipped.set(True)
    try:
        for tensor in tensors:
            # in a backward torch itself answers, and has no address
            with contextlib.suppress(RuntimeError):
                tensor.data_ptr()
            if isinstance(tensor, FakeTensor) and hasattr(mode, "values"):  # of `make_fake_mode`
                mode.values.forget(tensor)
    finally:
        is_skipped.reset(token)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(getattr(value, "base", None), Tensor):  # a view of other type, or a descriptor
        yield from _tensors(value.base)
    elif not (isinstance(value, _PLAIN) or type(value).__module__.startswith("triton.")):
        raise RuntimeError(f"a kernel of its own needs real memory: of a {type(value).__name__}")


class _SkippedLaunches:
    """Inside, ``kernel[grid](...)`` is `_skip` under fake tensors, and as ever elsewhere (in other threads).

    Torch has no hook for launches, nor has Triton one that skips them: Triton's own method is exchanged
    meanwhile, counted over all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._kernels: Any = None
        self._launch: Any = None

    def __enter__(self) -> None:
        with self._lock:
            triton: Any = sys.modules.get("triton.runtime.jit")
            if self._count == 0 and triton is not None:
                self._kernels = triton.KernelInterface
                self._launch = launch = self._kernels.__getitem__

                def launch_or_skip(kernel: Any, grid: Any) -> Any:
                    own = launch(kernel, grid)

                    def decided_at_each_call(*args: Any, **kwargs: Any) -> Any:
                        mode = torch._C._get_dispatch_mode(_FAKE)
                        return own(*args, **kwargs) if mode is None else _skip(mode, args, kwargs)

                    return decided_at_each_call  # somebody may hold it

                self._kernels.__getitem__ = launch_or_skip
            self._count += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._kernels is not None:
                self._kernels.__getitem__ = self._launch
                self._kernels = None


skipped_launches = _SkippedLaunches()
