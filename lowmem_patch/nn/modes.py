"""A torch function mode around a foreign forward while a model trains."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lowmem_patch.tracing.observers import FunctionObserver

_LOCK = threading.Lock()


class AroundForward(FunctionObserver):
    """Runs each call of a torch function in a module's forward by ``call(func, args, kwargs)``.

    Functions that torch.compile compiled run as they are written inside: the compiler would compile the mode
    into them, at which torch 2.12 fails.
    """

    _running = 0  # modes of all threads, since all have one stance
    _stance: Any = None

    def __enter__(self) -> Any:
        with _LOCK:
            if AroundForward._running == 0:
                AroundForward._stance = _force_eager()
            AroundForward._running += 1
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        with _LOCK:
            AroundForward._running -= 1
            if AroundForward._running == 0 and AroundForward._stance is not None:
                AroundForward._stance.__exit__(*error)


def _force_eager() -> Any:
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError:  # the forward is a part of what is compiled, where nobody may ask for this
        return None
