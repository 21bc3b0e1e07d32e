"""A module whose forward calls something else in the place of one torch function (``F.silu``).

The forward runs under a torch function mode, which looks at each torch function that is called meanwhile, and
costs time at each. So it runs around the module that calls the function, and around no larger one. What the
modules inside of that one call is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lowmem_patch.nn.modes import ForwardMode, run_under
from lowmem_patch.tracing.call_arguments import CalledFunction, called_function


def call_instead(module: nn.Module, function: CalledFunction, replacement: nn.Module) -> None:
    """Let the module's forward call ``replacement`` where it calls ``function`` with gradients on."""
    run_under(module, _Instead, function, replacement)


class _Instead(ForwardMode):
    def __init__(
        self,
        module: nn.Module,
        function: CalledFunction,
        replacement: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(module)
        self.function = function
        self.replacement = replacement

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") != self.function.name or not self.packs_alike():
            return func(*args, **kwargs)
        read = called_function(self.function.name, args, kwargs)
        if read is None or read[1] != self.function or not _is_running(self.module):
            return func(*args, **kwargs)
        return self.replacement(read[0])


_CALL = nn.Module._call_impl.__code__


def _is_running(module: nn.Module) -> bool:
    """Whether no module inside of this one is being called; what the forward makes by itself is its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            called = frame.f_locals["self"]
            if called is module or any(called is inside for inside in module.modules()):
                return called is module
        frame = frame.f_back
    return True
