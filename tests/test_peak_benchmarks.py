"""``benchmarks/predicted.py`` and ``benchmarks/longest.py`` at tiny widths on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(600)


def result_of(script: str, folder: Path, *arguments: str) -> Any:
    out = folder / "result.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--device", "cpu", "--tiny", "--json", str(out),
         *arguments],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_predicted_peaks_are_measured(tmp_path: Path) -> None:
    found = result_of("predicted.py", tmp_path, "--only", "Swin-B full sgd")
    assert not found["skipped"] and found["worst_error"] <= 0.03
    whole, fitted = found["rows"]
    assert "budget" not in whole and fitted["measured"] <= fitted["predicted"] <= fitted["budget"]
    assert fitted["measured"] < whole["measured"]
    left_out = result_of("predicted.py", tmp_path, "--only", "qlora")
    assert not left_out["rows"] and all("bitsandbytes" in one["why"] for one in left_out["skipped"])


def test_the_longest_sequence_is_where_the_line_ends(tmp_path: Path) -> None:
    found = result_of("longest.py", tmp_path, "--variants", "unpatched", "auto", "liger")
    rows = {row["variant"]: row for row in found["rows"]}
    plain, patched = rows["unpatched"], rows["auto"]
    assert plain["off_the_line"] == pytest.approx(0.0, abs=0.03)
    assert patched["longest"] > 1.2 * plain["longest"]
    assert patched["bytes_per_token"] < plain["bytes_per_token"]
