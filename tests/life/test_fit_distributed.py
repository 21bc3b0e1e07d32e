"""Blocks that run again on two processes: what FSDP2 wraps around a block lies outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.life.fitted_runs import LEVELS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fitted")
    script = Path(__file__).with_name("fitted_runs.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True, text=True, env=environment, timeout=350, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / "fitted.pt")
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_those_of_blocks_as_patched(
    runs: dict[str, Any], way: str, level: str
) -> None:
    wanted, found = runs[f"{way} patched"], runs[f"{way} {level}"]
    assert not isinstance(found, str), found
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
