"""ms-swift's own import of external plugins, and its table of callbacks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

import lowmem_patch
from lowmem_patch import patch_report
from tests.integrations.trainings import arguments, token_rows
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
