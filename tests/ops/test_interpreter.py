"""Runs the tests of this folder once more, on the Triton kernels under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.versions import OLD_TRITON

pytest.importorskip("triton")


FILES = (
    "activations", "affine", "channel_norms", "codes", "cross_entropy", "dropout", "eight_bit", "linear",
    "norms", "places", "rotary", "scaled_linear",
)  # fmt: skip


@pytest.mark.timeout(900)  # a thousand interpreted tests; a minute on an idle machine
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted")
def test_kernels_pass_the_same_tests_under_the_interpreter() -> None:
    folder = Path(__file__).parent
    files = [str(folder / f"test_{name}.py") for name in FILES]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *OLD_TRITON, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
