"""LLaMA-Factory itself under ``lowmem-patch run``: LoRA of the bundled LLaMA on rows of a JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.integrations.trainings import assert_same_training
from tests.integrations.watched import (
    LAYERS,
    STEPS,
    assert_repeats,
    launched,
    result_of,
    save_base,
)
from tests.support.judge import assert_outputs
from tests.support.step import FP32, Step

pytest.importorskip("llamafactory")

ROWS = 16
UNCHECKPOINTED = {"disable_gradient_checkpointing": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in float32, and rows to train it on."""
    folder = save_base(tmp_path_factory.mktemp("base"))
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


def trained(
    base: Path, folder: Path, *run: str, double: bool = False, **changes: Any
) -> tuple[Step, str]:
    """A training that is watched, and what it writes; ``run``: by that command."""
    config, out = config_file(base, folder, **changes), folder / "result.pt"
    more = {"WATCH_DOUBLE": "1"} if double else {}
    script = "tests.integrations.scripts.llamafactory_train"
    command = (*run, "-m", script) if run else (script,)
    text = launched(*command, config, WATCH_OUT=str(out), **more)
    return result_of(out), text


RUN = ("lowmem_patch", "run", "--preset", "exact", "--strict")


@pytest.fixture(scope="module")
def as_it_comes(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Step, Step]:
    """Unpatched, and unpatched in float64."""
    return unpatched(base, tmp_path_factory.mktemp("unpatched"))


def unpatched(base: Path, folder: Path, **changes: Any) -> tuple[Step, Step]:
    own, truth = (
        trained(base, folder / str(double), double=double, **changes)[0] for double in (False, True)
    )
    assert_repeats(own, truth)
    return own, truth


def assert_trains_the_same(
    base: Path, folder: Path, own: Step, truth: Step, *, checkpointed: bool, **changes: Any
) -> None:
    found, text = trained(base, folder, *RUN, **changes)
    assert_same_training(found, own, truth)
    assert found.saved < own.saved
    assert "1 model patched" in text and "PeftModelForCausalLM, preset exact" in text
    assert ("activation checkpointing is on" in text) is checkpointed
    (report,) = json.loads((folder / "out/lowmem_patch.json").read_text())["models"]
    # the adapters were there: seven Linears of each layer, beside two norms, an activation, and the last norm
    assert f"{7 * LAYERS} adapter layers keep one copy of their input" in report["notes"]
    strategies = [site["strategy"] for site in report["sites"]]
    assert len(strategies) == 3 * LAYERS + 1 and "keep" not in strategies


def test_as_it_comes_with_reentrant_checkpointing(
    base: Path, tmp_path: Path, as_it_comes: tuple[Step, Step]
) -> None:
    assert_trains_the_same(base, tmp_path, *as_it_comes, checkpointed=True)


def test_without_its_checkpointing(base: Path, tmp_path: Path) -> None:
    own, truth = unpatched(base, tmp_path, **UNCHECKPOINTED)
    assert_trains_the_same(
        base, tmp_path / "patched", own, truth, checkpointed=False, **UNCHECKPOINTED
    )


@pytest.mark.parametrize("command", ["llamafactory-cli", "-m llamafactory.launcher"])
def test_its_commands_run_unchanged(
    base: Path, tmp_path: Path, command: str, as_it_comes: tuple[Step, Step]
) -> None:
    config = config_file(base, tmp_path)
    script = [str(Path(sys.executable).parent / "llamafactory-cli"), "train"]
    text = launched(*RUN, *(script if command == "llamafactory-cli" else command.split()), config)
    assert text.count("PeftModelForCausalLM, preset exact: 13 of 13 sites patched") == 1
    assert "1 model patched: PeftModelForCausalLM (13 of 13 sites)" in text
    log = (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, log) if "loss" in entry]
    assert len(losses) == STEPS
    found = Step([torch.tensor(losses, dtype=torch.float64)], {})
    assert_outputs(found, *as_it_comes, FP32)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
