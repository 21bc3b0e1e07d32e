"""The table of saved bytes, then and now."""

from __future__ import annotations

from typing import Any

from zoo.changes import changes


def _presets(**saved: int) -> dict[str, Any]:
    strategies = {"fold": 1, "keep": 3}
    return {
        name: {"saved_before": 200, "saved_after": after, "strategies": strategies}
        for name, after in saved.items()
    }


def test_models_that_save_more_are_counted_and_named() -> None:
    then = {"a": _presets(auto=100, exact=100, paper=90), "b": _presets(auto=50), "gone": {}}
    now = {"a": _presets(auto=101, exact=100, paper=80), "b": _presets(auto=50), "new": {}}
    lines = changes(then, now)
    assert lines[:3] == [
        "| auto | 2 | 0 | 1 | 1 |\n",
        "| exact | 1 | 0 | 1 | 0 |\n",
        "| paper | 1 | 1 | 0 | 0 |\n",
    ]
    assert "at most\n1.0 % more" in lines[3]
    assert lines[4:] == ["| a (auto) | 1 fold | 1 fold | 0.50 | 0.51 |\n"]
