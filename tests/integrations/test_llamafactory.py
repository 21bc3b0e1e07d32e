"""LLaMA-Factory itself under ``lowmem-patch run``: LoRA of the bundled LLaMA on rows of a JSON file."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lowmem_patch.demo import LLAMA_FOLDER, load_demo_llama
from lowmem_patch.integrations.script import ScriptPatching, run_script
from tests.integrations.trainings import assert_same_training
from tests.support.judge import assert_outputs
from tests.support.step import FP32, Step

pytest.importorskip("llamafactory")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "llamafactory_train.py"
STEPS, ROWS, LAYERS = 3, 16, 4

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's folder takes the first place of the search path, which must not be the repository's."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in float32, and rows to train it on."""
    folder = tmp_path_factory.mktemp("base")
    load_demo_llama().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA_FOLDER / name, folder)
    rows = [
        {"instruction": f"Add {i} and {i + 1}.", "input": "", "output": f"It is {2 * i + 1}."}
        for i in range(ROWS)
    ]
    (folder / "sums.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
    return folder


def config_file(base: Path, folder: Path, **changes: Any) -> Path:
    """What a user of LLaMA-Factory writes."""
    folder.mkdir(exist_ok=True)
    settings = {
        "model_name_or_path": str(base), "stage": "sft", "do_train": True, "finetuning_type": "lora",
        "lora_rank": 4, "lora_target": "all", "dataset": "sums", "dataset_dir": str(base),
        "template": "alpaca", "cutoff_len": 64, "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 0.05, "optim": "sgd",
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0, **changes,
    }  # fmt: skip
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def trained(base: Path, folder: Path, preset: str | None, *more: str, **changes: Any) -> Step:
    """Losses, changes of the adapters, and bytes of a batch."""
    config, out = config_file(base, folder, **changes), folder / "result.pt"
    given = [str(config), "--out", str(out), *more]
    if preset is None:
        before, sys.argv = sys.argv, [str(SCRIPT), *given]
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            sys.argv = before
    else:
        run_script(str(SCRIPT), given, ScriptPatching(preset, strict=True))
    result = torch.load(out)
    moved = {name: value - result["before"][name] for name, value in result["after"].items()}
    assert moved and all("lora_" in name for name in moved)
    losses = torch.tensor(result["losses"], dtype=torch.float64)
    return Step([losses], moved, saved=result["saved"])


@pytest.mark.parametrize("checkpointed", [True, False], ids=["as it comes", "no checkpointing"])
def test_exact_trains_as_the_unpatched_model(
    base: Path, tmp_path: Path, checkpointed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {} if checkpointed else {"disable_gradient_checkpointing": True}
    own = trained(base, tmp_path / "own", None, **changes)
    truth = trained(base, tmp_path / "truth", None, "--double", **changes)
    found = trained(base, tmp_path / "patched", "exact", **changes)
    assert_same_training(found, own, truth)
    assert len(found.outputs[0]) == STEPS and found.saved < own.saved
    text = capsys.readouterr().err
    assert "1 model patched" in text and "PeftModelForCausalLM, preset exact" in text
    assert ("activation checkpointing is on" in text) is checkpointed
    (report,) = json.loads((tmp_path / "patched/out/lowmem_patch.json").read_text())["models"]
    # the adapters were there: seven Linears of each layer, beside two norms, an activation, and the last norm
    assert f"{7 * LAYERS} adapter layers keep one copy of their input" in report["notes"]
    strategies = [site["strategy"] for site in report["sites"]]
    assert len(strategies) == 3 * LAYERS + 1 and "keep" not in strategies


@pytest.mark.parametrize("command", ["llamafactory-cli", "-m llamafactory.launcher"])
def test_its_commands_run_unchanged(base: Path, tmp_path: Path, command: str) -> None:
    config = str(config_file(base, tmp_path))
    script = [str(Path(sys.executable).parent / "llamafactory-cli"), "train"]
    done = subprocess.run(
        [sys.executable, "-m", "lowmem_patch", "run", "--preset", "exact", "--strict",
         *(script if command == "llamafactory-cli" else command.split()), config],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 model patched\n  PeftModelForCausalLM, preset exact: 13 of 13 sites" in done.stderr
    log = (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, log) if "loss" in entry]
    own = trained(base, tmp_path / "own", None)
    truth = trained(base, tmp_path / "truth", None, "--double")
    found = Step([torch.tensor(losses, dtype=torch.float64)], {})
    assert len(losses) == STEPS
    assert_outputs(found, own, truth, FP32)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
