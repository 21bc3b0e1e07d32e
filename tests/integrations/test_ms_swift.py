"""ms-swift's own import of external plugins, its table of callbacks, and a training."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

import lowmem_patch
from lowmem_patch import patch_report
from tests.integrations.trainings import (
    SEVERAL_PROCESSES,
    arguments,
    assert_same_training,
    token_rows,
)
from tests.integrations.watched import (
    SCRIPTS,
    STEPS,
    assert_repeats,
    launched,
    result_of,
    save_base,
    save_chats,
)
from tests.support.models import llama

swift_utils = pytest.importorskip("swift.utils")
swift_callbacks = pytest.importorskip("swift.callbacks")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
FILE = Path(lowmem_patch.__file__).parent / "integrations" / "ms_swift" / "lowmem_patch_plugin.py"


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Swift's table after ``--external_plugins FILE``."""
    monkeypatch.setattr(sys, "path", sys.path[:])  # swift puts the file's folder on it
    for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
        monkeypatch.delitem(sys.modules, name)  # of an earlier test: swift would not run it again
    table = swift_callbacks.callbacks_map
    table.pop("lowmem_patch", None)
    swift_utils.import_external_file(str(FILE))
    return table


def test_the_callback_patches_the_model_of_the_trainer(
    callbacks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWMEM_PATCH_PRESET", "exact")
    model, settings = llama(), arguments(tmp_path)
    # as swift's trainer makes its callbacks: before it has a model
    made = callbacks["lowmem_patch"](settings, SimpleNamespace(template=None))
    trainer = Trainer(model, settings, train_dataset=token_rows(), callbacks=[made])
    trainer.train()
    assert patch_report(model).config.name == "exact"


def test_a_budget_comes_with_the_length_of_the_template(
    callbacks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWMEM_PATCH_FIT", "24GiB")
    trainer = SimpleNamespace(template=SimpleNamespace(max_length=77))
    patching = callbacks["lowmem_patch"](None, trainer).patching
    assert (patching.preset, patching.fit, patching.sequence_length) == ("auto", "24GiB", 77)


def test_the_folder_on_the_search_path_hides_nothing(callbacks: Any) -> None:
    assert sys.path[0] == str(FILE.parent)
    assert importlib.import_module("transformers").__name__ == "transformers"
    assert {path.stem for path in FILE.parent.glob("*.py")} == {"__init__", "lowmem_patch_plugin"}


@SEVERAL_PROCESSES
def test_its_own_training_is_the_unpatched_one(tmp_path: Path) -> None:
    """``swift sft`` with the file, and with reentrant checkpointing, as it comes."""
    pytest.importorskip("dacite")  # without which swift trains nothing
    base, rows = save_base(tmp_path / "base"), save_chats(tmp_path / "rows.jsonl")
    settings = {
        "model": base, "model_type": "llama", "template": "default", "tuner_type": "lora", "lora_rank": 4,
        "lora_dropout": 0, "dataset": rows, "max_steps": STEPS, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "use_cpu": "true", "torch_dtype": "float32", "fp16": "false",
        "bf16": "false", "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant",
        "warmup_ratio": 0, "max_grad_norm": 0, "max_length": 512, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "eval_strategy": "no", "dataset_num_proc": 1, "use_hf": "true",
        "dataloader_num_workers": 0, "add_version": "false",
    }  # fmt: skip

    def trained(name: str, **more: str) -> Any:
        command = ["swift.cli.sft", "--output_dir", str(tmp_path / name)]
        for key, value in settings.items():
            command += [f"--{key}", str(value)]
        patched = name == "patched"
        command += ["--external_plugins", str(SCRIPTS / "swift_watch.py"), *([str(FILE)] * patched)]
        command += ["--callbacks", "watch", *(["lowmem_patch"] * patched)]
        result = tmp_path / f"{name}.pt"
        more |= {"WATCH_OUT": str(result), "MODELSCOPE_CACHE": str(tmp_path / "modelscope")}
        text = launched(*command, LOWMEM_PATCH_PRESET="exact", **more)
        return result_of(result), text

    (own, plain), (truth, _) = trained("own"), trained("truth", WATCH_DOUBLE="1")
    assert_repeats(own, truth)
    found, text = trained("patched")
    assert_same_training(found, own, truth)
    assert found.saved <= own.saved
    assert "lowmem-patch" not in plain
    assert "PeftModelForCausalLM, preset exact: 13 of 13 sites patched" in text
    assert "gradient_checkpointing=True" in text
    assert json.loads((tmp_path / "patched" / "lowmem_patch.json").read_text())["models"]
