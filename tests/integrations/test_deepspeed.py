"""DeepSpeed's ZeRO under transformers' Trainer, on two processes of a CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from tests.integrations.trainings import (
    ROWS,
    SEVERAL_PROCESSES,
    STEPS,
    arguments,
    assert_same_training,
    token_rows,
    truth_by,
)
from tests.support.models import llama
from tests.support.step import Step

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_trainer.py"
RANKS = 2
TIMEOUT = 840  # DeepSpeed compiles its operator for processes of one machine on its first run

pytestmark = [
    SEVERAL_PROCESSES,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("c++") is None, reason="DeepSpeed compiles an operator"),
]


def launched(*given: str | Path) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
         str(SCRIPT), *map(str, given)],
        capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


def trained(stage: int, folder: Path, preset: str | None) -> tuple[Step, Any]:
    """The mean of the processes' losses, what happened to the weights, and what the first process says."""
    folder.mkdir()
    asked = () if preset is None else ("--preset", preset)
    done = launched("--out", folder / "result.pt", "--stage", str(stage), *asked)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("sites patched") == (preset is not None), "said by the first process"
    found = [torch.load(folder / f"result.{rank}") for rank in range(RANKS)]
    losses = torch.tensor([result["losses"] for result in found], dtype=torch.float64).mean(dim=0)
    assert len(losses) == STEPS
    return Step([losses], found[0]["moved"], found[0]["saved"]), found[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_exact_trains_as_the_unpatched_model(stage: int, tmp_path: Path) -> None:
    """Stage 3 takes apart a model that was built without it, after the patch."""
    own, _ = trained(stage, tmp_path / "own", None)
    found, said = trained(stage, tmp_path / "patched", "exact")
    assert said["engine"] == "DeepSpeedEngine" and (said["apart"] > 0) == (stage == 3)

    # the rows of both processes in one
    def make() -> Trainer:
        settings = arguments(
            tmp_path / "one", per_device_train_batch_size=RANKS * ROWS, max_grad_norm=0.0
        )
        return Trainer(llama(), settings, train_dataset=token_rows())

    assert_same_training(found, own, truth_by(make))
    assert found.saved < own.saved


def test_a_model_that_zero_took_apart_when_it_was_loaded_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    done = launched(
        "--out", tmp_path / "result.pt", "--stage", "3", "--preset", "exact",
        "--checkpoint", tmp_path / "base",
    )  # fmt: skip
    assert done.returncode != 0
    assert "ConfigError: DeepSpeed ZeRO-3 has taken the weights apart" in done.stderr
