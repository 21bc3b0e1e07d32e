"""Do something to a module as soon as it has been imported, and take it back."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class Replacements:
    """Attributes that were set in the place of others."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute that is there."""
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put back what was there, the last first."""
        while self._originals:
            owner, name, value = self._originals.pop()
            setattr(owner, name, value)


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
                spec.loader = _Loader(spec.loader, self.actions[name])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as another loader does, and then acts."""

    def __init__(self, loader: Any, action: Action) -> None:
        self.loader, self.action = loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # a file's path and source, for inspect and pkgutil
