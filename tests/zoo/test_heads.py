"""The table of loss heads says which models save more than the floor allows."""

from __future__ import annotations

from zoo.heads import MOST, NEVER, _floors
from zoo.result import Result


def test_models_above_the_limit_are_named_the_largest_first() -> None:
    multiples = {"a": MOST, "b": MOST + 0.001, "c": 1.5, "uncounted": 0.0}
    results = [Result(name, NEVER, above_floor=value) for name, value in multiples.items()]
    text = "\n".join(_floors(results))
    assert "1 of 3 model types" in text
    assert text.endswith("c 1.500, b 1.021.")
    assert "\n".join(_floors(results[:1])).endswith("none.")
