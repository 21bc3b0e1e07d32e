"""Models that many tests read: built once; a test that changes one takes a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.patching.families import FAMILIES
from tests.patching.helpers import build

_BUILT: dict[str, Any] = {}


@pytest.fixture
def make() -> Callable[[str], Any]:
    """``make("llama")``: a fresh copy of the family's model, the same weights each time."""

    def fresh(name: str) -> Any:
        if name not in _BUILT:
            _BUILT[name] = build(FAMILIES[name])
        return copy.deepcopy(_BUILT[name])

    return fresh
