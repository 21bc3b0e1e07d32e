"""Two tiers of tests: `make test` leaves out what is marked slow, `make test-all` runs everything.

A slow test takes more than three seconds on a CPU. Quicker ones hold its contract as well, on smaller models
or other cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, slow but for these."""
    listed = list(cases)
    assert all(case in listed for case in quick)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in listed
    ]
