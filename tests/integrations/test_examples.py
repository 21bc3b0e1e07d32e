"""Every example runs as it is, on the bundled models."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trainings import SEVERAL_PROCESSES
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NEEDS = {"trl_sft.py": "trl", "lightning_finetune.py": "lightning"}
REPORTS = {
    "lora_trainer.py": "lowmem_patch.json",
    "trl_sft.py": "lowmem_patch.json",
    "lightning_finetune.py": "checkpoints/lowmem_patch.json",
}


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints, in a process of its own, without a GPU."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)], capture_output=True, text=True, timeout=240,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            **environment,
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def run_here(name: str, *arguments: str | Path) -> None:
    """An example, in this process, which has imported what it imports."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_named_where_one_looks() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
    assert scripts and all(f"[{name}]({name})" in listed for name in scripts)


@pytest.mark.parametrize("name", slow_but(sorted(REPORTS), "lora_trainer.py"))
def test_an_example_with_a_trainer_runs_and_reports(name: str, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: make test-integrations")
    if name in NEEDS:
        run(EXAMPLES / name, "--steps", "2", "--out", tmp_path)
    else:
        run_here(name, "--steps", "2", "--out", tmp_path)
    (model,) = json.loads((tmp_path / REPORTS[name]).read_text())["models"]
    assert 0 < model["saved_after"] < model["saved_before"]


def test_the_timm_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_here("timm_finetune.py", "--steps", "2")
    text = capsys.readouterr().out
    assert "sites patched" in text and "last loss" in text


def test_the_example_of_cuda_graphs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_here("cuda_graph.py", "--steps", "2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert re.search(rf"last loss 0\.\d+; [\d.]+ ms a step on a {device}", capsys.readouterr().out)


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "commit it without outputs"
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"quickstart.ipynb, cell {number}", "exec"), names)
    assert 0 < names["bytes_after"] < names["bytes_before"]
    assert capsys.readouterr().out.splitlines()[-1] == "True"


@SEVERAL_PROCESSES
def test_the_gpipe_example_runs_in_two_stages() -> None:
    text = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "gpipe.py",
        "--steps", "2",
    )  # fmt: skip
    assert "sites patched" in text and "in 2 stages" in text


@SEVERAL_PROCESSES
def test_the_fsdp2_example_runs_on_two_processes(tmp_path: Path) -> None:
    # accelerate has FSDP2 for accelerators alone, torch for CPUs as well
    wrapper = tmp_path / "on_cpu.py"
    wrapper.write_text(
        "import runpy, sys\nfrom accelerate import DistributedType, PartialState\n"
        "PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU\n"
        f"sys.argv[0] = {str(EXAMPLES / 'fsdp2_accelerate.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    text = run(
        "-m", "accelerate.commands.launch", "--num-processes", "2", "--num-machines", "1",
        "--main-process-port", "0", "--mixed-precision", "no", "--dynamo-backend", "no", "--use-fsdp",
        "--fsdp-version", "2", "--fsdp-auto-wrap-policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp-transformer-layer-cls-to-wrap", "LlamaDecoderLayer", wrapper, "--steps", "2",
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert "last loss" in text and "on 2 processes" in text
