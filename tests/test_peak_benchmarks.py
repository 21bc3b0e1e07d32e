"""``benchmarks/predicted.py`` and ``benchmarks/longest.py`` at tiny widths on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def result_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What a script writes, run in this process: an import of transformers takes as long as a tiny run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def result(script: str, *arguments: str) -> Any:
        out = tmp_path / "result.json"
        given = [script, "--device", "cpu", "--tiny", "--json", str(out), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        importlib.import_module(script).main()
        return json.loads(out.read_text())

    yield result
    for name in ("predicted", "longest"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_predicted_peaks_are_measured(result_of: Callable[..., Any]) -> None:
    found = result_of("predicted", "--only", "Swin-B full sgd")
    assert not found["skipped"] and found["worst_error"] <= 0.03
    whole, fitted = found["rows"]
    assert "budget" not in whole and fitted["measured"] <= fitted["predicted"] <= fitted["budget"]
    assert fitted["measured"] < whole["measured"]
    left_out = result_of("predicted", "--only", "qlora")
    assert not left_out["rows"] and all("bitsandbytes" in one["why"] for one in left_out["skipped"])


def test_the_longest_sequence_is_where_the_line_ends(result_of: Callable[..., Any]) -> None:
    found = result_of("longest", "--variants", "unpatched", "auto", "liger")
    rows = {row["variant"]: row for row in found["rows"]}
    plain, patched = rows["unpatched"], rows["auto"]
    assert plain["off_the_line"] == pytest.approx(0.0, abs=0.03)
    assert patched["longest"] > 1.2 * plain["longest"]
    assert patched["bytes_per_token"] < plain["bytes_per_token"]
