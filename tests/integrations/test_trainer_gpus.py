"""A trainer's budget is of each GPU, and the trainer's accelerate knows how many share the model."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]  # ships none
from accelerate.utils import DistributedType  # type: ignore[import-untyped]  # ships none
from transformers import Trainer

from lowmem_patch import patch_model
from lowmem_patch.integrations import LowmemTrainerCallback, patching
from tests.integrations.trainings import arguments
from tests.support.models import llama


@pytest.mark.parametrize(
    ("kind", "version", "mixed", "gpus"),
    [
        ("FSDP", 2, None, 4),
        ("FSDP", 2, object(), None),
        ("FSDP", 1, None, None),
        ("MULTI_GPU", None, None, None),
    ],
    ids=["FSDP2", "FSDP2 with others", "FSDP1", "DDP"],
)
def test_fsdp2_is_told_the_number_of_gpus(
    kind: str,
    version: int | None,
    mixed: object,
    gpus: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int | None] = []

    def patch(model: Any, *_: Any, **given: Any) -> Any:
        found.append(given.get("gpus"))
        return patch_model(model, "exact")

    monkeypatch.setattr(patching, "patch_model", patch)
    trainer = Trainer(llama(), arguments(tmp_path))
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType[kind])
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 4)
    plugin = types.SimpleNamespace(fsdp_version=version)
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", mixed)
    callback = LowmemTrainerCallback("exact", fit="24GiB", sequence_length=9)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, trainer.model)
    assert found == [gpus]
