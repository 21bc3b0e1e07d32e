"""Triton kernels under fake tensors: a launch runs nothing, and is seen as a request for addresses.

A kernel allocates nothing. It writes into what torch's own ops have made, so that shapes and saved bytes are
known without it. Kernels in C++ that make their own outputs are none of these.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # has no types
# whether the address that is asked for here is that of a launch that runs nothing
is_skipped: ContextVar[bool] = ContextVar("is_skipped", default=False)


def _skip(*args: Any, **kwargs: Any) -> None:
    token = is_skipped.set(True)
    try:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                with contextlib.suppress(
                    RuntimeError
                ):  # in a backward no mode answers in torch's place
                    given.data_ptr()
    finally:
        is_skipped.reset(token)


class _SkippedLaunches:
    """Inside, ``kernel[grid](...)`` is `_skip` under fake tensors, and as ever elsewhere (in other threads).

    Torch has no hook for launches, nor has Triton one that skips them: Triton's own method is exchanged
    meanwhile, counted over all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._kernels: Any = None
        self._launch: Callable[..., Any] = _skip

    def __enter__(self) -> None:
        with self._lock:
            triton: Any = sys.modules.get("triton.runtime.jit")
            if self._count == 0 and triton is not None:
                self._kernels = triton.KernelInterface
                self._launch = launch = self._kernels.__getitem__

                def launch_or_skip(kernel: Any, grid: Any) -> Any:
                    fake = torch._C._get_dispatch_mode(_FAKE) is not None
                    return _skip if fake else launch(kernel, grid)

                self._kernels.__getitem__ = launch_or_skip
            self._count += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._kernels is not None:
                self._kernels.__getitem__ = self._launch
                self._kernels = None


skipped_launches = _SkippedLaunches()
