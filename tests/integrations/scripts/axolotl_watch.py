"""A plugin of Axolotl that watches the training."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from tests.integrations.scripts.watch import Watch


class WatchPlugin(BasePlugin):
    """Adds the callback."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return [Watch(fills=True)]
