"""The public names are a promise: adding one is a decision, losing one breaks somebody's code."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowmem_patch
from lowmem_patch import errors
from lowmem_patch.config import load_config
from lowmem_patch.errors import ConfigError

PUBLIC_NAMES = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DoubleBackwardError",
    "FitError",
    "HostMemoryError",
    "LowmemPatchError",
    "NothingToPatchError",
    "PatchConfig",
    "PatchError",
    "PatchReport",
    "TraceError",
    "UnfoldedWeightsError",
    "VariantError",
    "__version__",
    "fit_step_table",
    "patch_model",
    "patch_report",
    "plan_patch",
    "saved_bytes",
    "unpatch_model",
    "verify_model",
]


def test_public_names_are_pinned() -> None:
    assert sorted(lowmem_patch.__all__) == PUBLIC_NAMES == dir(lowmem_patch)


def test_every_error_is_exported() -> None:
    assert set(errors.__all__) < set(PUBLIC_NAMES)
    assert all(getattr(lowmem_patch, name) is getattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_exists(name: str) -> None:
    assert getattr(lowmem_patch, name) is not None


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "__version__"])
def test_public_name_is_documented(name: str) -> None:
    text = getattr(lowmem_patch, name).__doc__
    assert text
    # dataclasses write "Name(field: type, ...)" where nobody wrote a docstring.
    assert not text.startswith(f"{name}(")


@pytest.mark.parametrize("batch", [torch.zeros(4, 8), [1, 2], {"input_ids": torch.zeros(4, 8)}])
def test_a_batch_in_the_place_of_the_preset_is_told_its_name(batch: Any) -> None:
    for call in (lowmem_patch.patch_model, lowmem_patch.plan_patch):
        with pytest.raises(errors.ConfigError, match=r"a batch is|give a batch") as caught:
            call(torch.nn.Linear(8, 8), batch)
        assert "example_inputs=" in str(caught.value) and "tensor" not in str(caught.value)


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.\w+)?", lowmem_patch.__version__)
    try:
        installed = importlib.metadata.version("lowmem-patch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("lowmem-patch is not installed, only importable")
    assert installed == lowmem_patch.__version__


def test_a_batch_in_the_place_of_a_preset_is_told_its_place() -> None:
    with pytest.raises(ConfigError, match="a batch is given as example_inputs="):
        load_config({"input_ids": torch.zeros(1)})
    with pytest.raises(ConfigError, match="unknown key norm") as misspelt:
        load_config({"norm": "share"})
    assert "example_inputs" not in str(misspelt.value)


def test_misspelt_words_get_the_known_ones_that_are_most_alike() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'excat'.*\(did you mean exact\?\)"):
        load_config("excat")
    with pytest.raises(ConfigError, match=r"unknown key norm;.*\(did you mean norms\?\)"):
        load_config({"norm": "share"})
    with pytest.raises(ConfigError) as unlike:
        load_config("bitsandbytes")
    assert "did you mean" not in str(unlike.value)


@pytest.mark.parametrize("line", ["bits: 9", "norms: shar", "fit: [1]", "attention: {a: 1}"])
def test_a_wrong_value_names_its_file(tmp_path: Path, line: str) -> None:
    (path := tmp_path / "mine.yaml").write_text(line, encoding="utf-8")
    key = line.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"mine\.yaml: {key}: "):
        load_config(path)


@pytest.mark.parametrize("name", [5, [1], None])
def test_a_name_is_words(name: object) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        load_config({"name": name})


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("norms: share\nbits: 2\nnorms: keep\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"twice\.yaml is not valid YAML: norms stands twice"):
        load_config(path)
    path.write_text("norms: share\nbits: 2\n", encoding="utf-8")
    assert (load_config(path).norms, load_config(path).bits) == ("share", 2)


@pytest.mark.parametrize("name", ["strict", "check"])
def test_a_switch_that_is_neither_true_nor_false_is_refused(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=f"{name}='no' is neither True nor False"):
        lowmem_patch.patch_model(model, example_inputs=(torch.ones(1, 2),), **{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "mend"),
    [
        (None, "got a NoneType: give one model"),
        ([torch.nn.Linear(2, 2)], "got a list: give one model"),
    ],
)
def test_no_model_and_several_are_named(given: Any, mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        lowmem_patch.patch_model(given)


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config file /.*none\.yaml$"):
        lowmem_patch.patch_model(torch.nn.Linear(2, 2), tmp_path / "none.yaml")
