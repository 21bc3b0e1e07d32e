"""A torch function mode around a foreign forward while a model trains."""

from __future__ import annotations

from typing import Any

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
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        eagerly.__exit__(*error)
