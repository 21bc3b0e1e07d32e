"""A patched model on several devices: function and gradients of the unpatched one, and fewer bytes.

Two processes run `distributed_runs.py` once for all tests: on CPUs with gloo, and with nccl where there
are two GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.life.distributed_models import MICROBATCHES, ROWS, VOCABULARY, WORLD
from tests.support.judge import assert_gradients, assert_outputs
from tests.support.step import MODES, Step
from tests.support.versions import before

ROOT = Path(__file__).parents[2]
LAYERS, TOKENS, WIDTH = 2, 48, 32
GAMMA = 4 * WIDTH  # bytes
WAYS = ("ddp", "fsdp", "fsdp_checkpointed", "gpipe", "tensor_parallel", "replicated")
CASES = [
    *((way, trains, preset) for way in WAYS for trains in ("full", "lora") for preset in ("exact", "auto")),
    *(("came_sharded", trains, preset) for trains in ("full", "columns") for preset in ("exact", "auto")),
    *(("sequence", trains, preset) for trains in ("full", "frozen") for preset in ("exact", "auto")),
    *((way, trains, "auto") for way in ("hsdp", "ddp_compiled") for trains in ("full", "lora")),
    ("fsdp_norms", "full", "exact"),
    ("fsdp_adapters", "lora", "exact"),
]  # fmt: skip

Runs = dict[str, Any]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    # once for all workers of pytest, whose folders lie beside each other
    workers = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if workers else base) / f"distributed-{request.param}"
    outcome = folder / "outcome.txt"
    try:
        folder.mkdir()
    except FileExistsError:
        while not outcome.exists():
            time.sleep(0.2)
    else:
        run_all(folder, request.param, outcome)
    assert not outcome.read_text(), outcome.read_text()
    found: Runs = torch.load(folder / "runs.pt")
    return {**found, "device": request.param}


def run_all(folder: Path, device: str, outcome: Path) -> None:
    """Leaves ``runs.pt``, and in ``outcome`` the end of the errors, if any, all at once."""
    script = Path(__file__).with_name("distributed_runs.py")
    # the package need not be installed, and an installed one is another
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if (
        device == "cpu"
    ):  # or transformers makes its mesh of the GPUs that it sees, and gloo's gathers crash
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(script), str(folder), device]
    error = "the runs took too long"
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
        error = "" if done.returncode == 0 else done.stderr[-3000:] or "the runs failed"
    finally:
        (folder / "written").write_text(error)
        (folder / "written").rename(outcome)


def run_of(runs: Runs, name: str) -> Step:
    found = runs[name]
    assert "error" not in found, f"{name}: {found['error']}"
    return Step(found["losses"], found["gradients"])


def saved(runs: Runs, name: str) -> int:
    run_of(runs, name)
    count: int = runs[name]["bytes"]
    return count


def skip_what_others_cannot(runs: Runs, way: str, trains: str) -> None:
    """PEFT 0.21.0 adds an adapter of all columns to a base of some (transformers 5.17), patched or not."""
    if way == "came_sharded" and before("transformers", "5.7"):
        pytest.skip("transformers 5.6 loads shards as plain tensors, and not as DTensors")
    if "error" in runs[f"{way} {trains} None"] and (way, trains) == ("came_sharded", "columns"):
        pytest.skip("the unpatched model fails as well")


@pytest.mark.parametrize("way,trains,preset", CASES)
def test_trains_as_the_unpatched_model(runs: Runs, way: str, trains: str, preset: str) -> None:
    skip_what_others_cannot(runs, way, trains)
    truth = run_of(runs, f"truth sequence {trains}" if way == "sequence" else f"truth {trains}")
    own, found = (run_of(runs, f"{way} {trains} {which}") for which in (None, preset))
    mode = MODES["autocast" if way == "fsdp_norms" else "fp32"]
    assert_outputs(found, own, truth, mode)
    assert_gradients(found, own, truth, mode)


@pytest.mark.parametrize("way,trains,preset", CASES)
def test_saves_no_more_than_the_unpatched_model(
    runs: Runs, way: str, trains: str, preset: str
) -> None:
    skip_what_others_cannot(runs, way, trains)
    before, after = (saved(runs, f"{way} {trains} {which}") for which in (None, preset))
    assert after < before or (way in ("fsdp_checkpointed", "fsdp_adapters") and after == before)


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize("trains", ["full", "lora"])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_saves_what_one_process_saves(runs: Runs, way: str, trains: str, preset: str) -> None:
    # FSDP2 frees gamma before a Linear's backward may read it: each norm behind which z is saved copies it
    copies = {"full": 4, "lora": 3}[trains] * GAMMA if way == "fsdp" else 0
    alone = saved(runs, f"alone {trains} {preset}")
    assert saved(runs, f"{way} {trains} {preset}") == alone + copies


@pytest.mark.parametrize("trains", ["full", "lora"])
def test_a_pipeline_saves_as_much_less_for_each_row(runs: Runs, trains: str) -> None:
    # both stages run all rows, each process of DDP half of them
    pipeline, halves = (
        saved(runs, f"{way} {trains} None") - saved(runs, f"{way} {trains} exact")
        for way in ("gpipe", "ddp")
    )
    # the model's own loss has logits of the last token, too; unpatched, each loss saves a scalar
    last_tokens = ROWS * 4 * (VOCABULARY - WIDTH)
    # a stage's norms save z, as nobody looks at their gammas, and copy these for each microbatch
    copies = MICROBATCHES * 4 * GAMMA if trains == "full" else 0
    assert pipeline == 2 * halves - last_tokens + 4 * (MICROBATCHES - WORLD) - copies


@pytest.mark.parametrize("way", ["tensor_parallel", "came_sharded"])
@pytest.mark.parametrize("preset", ["exact", "auto"])
def test_tensor_parallel_keeps_half_the_columns(runs: Runs, way: str, preset: str) -> None:
    if runs["device"] != "cpu":
        pytest.skip("attention keeps other tensors there")
    skip_what_others_cannot(runs, way, "full")
    # q, k, v, out, log-sum-exp, gate, up; down_proj reads a DTensor, and keeps the product
    columns = 32 + 16 + 16 + 32 + 4 + 64 + 64
    half = LAYERS * TOKENS * 4 * columns // 2
    product = LAYERS * TOKENS * 4 * 64 // 2
    expected = saved(runs, "all rows full exact") - half + product
    if way == "came_sharded":  # the head, too, and logits of a DTensor are computed whole
        expected += TOKENS * 4 * (VOCABULARY - WIDTH) + 4
    assert saved(runs, f"{way} full {preset}") == expected


def test_dropout_on_dtensors_is_torchs_own(runs: Runs) -> None:
    own, found = (run_of(runs, f"dropout {preset}") for preset in (None, "exact"))
    assert_outputs(found, own, own, MODES["fp32"])
    assert_gradients(found, own, own, MODES["fp32"])


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize("trains", ["full", "columns"])
def test_a_model_that_came_sharded_keeps_its_weights(runs: Runs, trains: str, preset: str) -> None:
    skip_what_others_cannot(runs, "came_sharded", trains)
    name = f"came_sharded {trains} {preset}"
    run_of(runs, name)
    found = runs[name]
    assert found["same weights"] and found["undone"]
    assert "the model came sharded" in found["report"]


def test_a_model_sharded_by_fsdp2_is_refused_untouched(runs: Runs) -> None:
    found = runs["fsdp_first"]
    assert "FSDP2" in found["refused"] and "before sharding" in found["refused"]
    assert found["same"]
