"""Axolotl's plugin manager with the plugin, and its training: nothing until keys stand in the YAML file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Trainer

from lowmem_patch import patch_report
from lowmem_patch.errors import ConfigError
from lowmem_patch.planning.report import find_records
from tests.integrations.trainings import (
    SEVERAL_PROCESSES,
    arguments,
    assert_same_training,
    token_rows,
)
from tests.integrations.watched import (
    STEPS,
    assert_repeats,
    launched,
    result_of,
    save_base,
    save_chats,
)
from tests.support.models import llama

base = pytest.importorskip("axolotl.integrations.base")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: pydantic's deprecations
PLUGIN = "lowmem_patch.integrations.axolotl_plugin.LowmemAxolotlPlugin"


@pytest.fixture
def manager() -> Any:
    """A manager with this plugin; an installed lowmem-patch is found by itself."""
    found = base.PluginManager.get_instance()
    if PLUGIN not in found.plugins:
        found.register(PLUGIN, required=True)
    return found


def callbacks_of(manager: Any, keys: dict[str, Any], model: Any = None) -> list[Any]:
    from axolotl.utils.dict import DictDefault

    found: list[Any] = manager.plugins[PLUGIN].add_callbacks_pre_trainer(DictDefault(keys), model)
    return found


def test_the_entry_point_names_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["axolotl.plugins"]
    assert [base.normalize_plugin_name(point) for point in points.values()] == [PLUGIN]
    assert isinstance(base.load_plugin(points["lowmem_patch"]), base.BasePlugin)


def test_it_does_nothing_until_it_is_configured(manager: Any) -> None:
    assert callbacks_of(manager, {"base_model": "some/model", "sequence_len": 128}) == []


def test_its_keys_are_checked_with_axolotls_own(manager: Any) -> None:
    from axolotl.integrations.config import merge_input_args

    _, schema = merge_input_args()
    assert {"lowmem_patch_preset", "lowmem_patch_fit"} <= set(schema.model_fields)
    assert schema.model_fields["lowmem_patch_preset"].default is None


def test_its_callback_patches_the_model_of_the_trainer(manager: Any, tmp_path: Path) -> None:
    model = llama()
    callbacks = callbacks_of(manager, {"lowmem_patch_preset": "exact"}, model)
    assert not find_records(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=token_rows(), callbacks=callbacks)
    trainer.train()
    assert patch_report(model).config.name == "exact"
    assert (tmp_path / "lowmem_patch.json").exists()


def test_a_budget_comes_with_the_length_of_the_rows(manager: Any) -> None:
    (callback,) = callbacks_of(manager, {"lowmem_patch_fit": "24GiB", "sequence_len": 77})
    patching = callback.patching
    assert (patching.preset, patching.fit, patching.sequence_length) == (None, "24GiB", 77)


def test_kernels_of_axolotl_that_write_over_saved_tensors_are_refused(
    manager: Any, tmp_path: Path
) -> None:
    def forward(self: Any, x: Any) -> Any:
        return x

    forward.__module__ = "axolotl.kernels.lora"
    model = llama()
    mlp = model.model.layers[1].mlp
    mlp.__dict__["forward"] = forward.__get__(mlp)
    callbacks = callbacks_of(manager, {"lowmem_patch_preset": "exact"})
    with pytest.raises(ConfigError, match="set lora_mlp_kernel"):
        Trainer(model, arguments(tmp_path), callbacks=callbacks)


@SEVERAL_PROCESSES
def test_its_own_training_is_the_unpatched_one(tmp_path: Path) -> None:
    """``axolotl train`` of a YAML file that has a key of the plugin's."""
    pytest.importorskip("posthog")  # without which Axolotl trains nothing
    base, rows = save_base(tmp_path / "base"), save_chats(tmp_path / "rows.jsonl")
    settings = {
        "base_model": str(base), "adapter": "lora", "lora_r": 4, "lora_alpha": 8,
        "lora_target_linear": True, "lora_mlp_kernel": False, "lora_qkv_kernel": False,
        "lora_o_kernel": False, "chat_template": "chatml", "sequence_len": 256, "micro_batch_size": 2,
        "datasets": [{"path": str(rows), "ds_type": "json", "type": "chat_template"}],
        "dataset_prepared_path": str(tmp_path / "prepared"), "dataset_num_proc": 1,
        "gradient_accumulation_steps": 1, "max_steps": STEPS, "num_epochs": 1, "optimizer": "sgd",
        "lr_scheduler": "constant", "learning_rate": 0.05, "max_grad_norm": 0.0, "bf16": False, "fp16": False,
        "tf32": False, "use_cpu": True, "save_strategy": "no", "logging_steps": 1,
        "plugins": ["tests.integrations.scripts.axolotl_watch.WatchPlugin"],
    }  # fmt: skip

    def trained(name: str, **more: str) -> Any:
        out = tmp_path / name
        keys = {"lowmem_patch_preset": "exact"} if name == "patched" else {}
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**settings, **keys, "output_dir": str(out)}))
        result = tmp_path / f"{name}.pt"
        more |= {"WATCH_OUT": str(result), "AXOLOTL_DO_NOT_TRACK": "1"}
        text = launched("axolotl.cli.train", config, **more)
        return result_of(result), text

    (own, plain), (truth, _) = trained("own"), trained("truth", WATCH_DOUBLE="1")
    assert_repeats(own, truth)
    found, text = trained("patched")
    assert_same_training(found, own, truth)
    assert found.saved < own.saved
    assert "lowmem-patch" not in plain
    assert "PeftModelForCausalLM, preset exact: 13 of 13 sites patched" in text
    assert json.loads((tmp_path / "patched" / "lowmem_patch.json").read_text())["models"]
