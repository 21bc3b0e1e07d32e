"""What the rules of zoo/shrink.py and zoo/feeds.py cannot know of single architectures. Tests only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FEEDS", "OVERRIDES"]

# ``arguments`` go to the config's constructor, ``values`` are set after shrinking (dotted paths)
OVERRIDES: dict[str, dict[str, Any]] = {}

# keyword arguments of one forward, from the config
FEEDS: dict[str, Callable[[Any], dict[str, Any]]] = {}
