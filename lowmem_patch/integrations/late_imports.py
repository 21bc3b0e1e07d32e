"""Do something to a module as soon as it has been imported."""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls an action for each named module: at once where it is imported already, else after its import.

    Args:
        actions: by full module name.
    """

    def __init__(self, actions: dict[str, Action]) -> None:
        self.actions = actions

    def __enter__(self) -> AfterImport:
        for name, action in self.actions.items():
            if name in sys.modules:
                action(sys.modules[name])
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with the action behind its loader."""
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                loader: Any = copy.copy(spec.loader)  # a zip file's loads other modules, too
                loader.exec_module = partial(_both, loader.exec_module, self.actions[name])
                spec.loader = loader
                return spec
        return None


def _both(execute: Action, action: Action, module: ModuleType) -> None:
    execute(module)
    action(module)
