"""Trainer's callback: a budget counts the optimizer that the arguments name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer

from lowmem_patch.integrations import LowmemTrainerCallback
from tests.integrations.test_trainer_callback import arguments, budget
from tests.integrations.test_trainer_callback import usual_logs as usual_logs  # a fixture
from tests.support.models import llama


@pytest.mark.parametrize(
    ("optim", "counted"),
    [("adamw_torch_fused", "adamw"), ("adamw_torch", "adamw_foreach"), ("adamw_8bit", "adamw8bit"),
     ("paged_adamw_32bit", "paged_adamw"), ("sgd", "sgd"), ("rmsprop", "adamw"), (None, "adamw")],
)  # fmt: skip
def test_a_budget_counts_the_optimizer_of_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    optim: str | None, counted: str,
) -> None:  # fmt: skip
    calls = budget(monkeypatch)
    model = llama()
    own = None if optim else torch.optim.SGD(model.parameters())
    callback = LowmemTrainerCallback("exact", fit="24GiB", sequence_length=33)
    args = arguments(tmp_path, optim=optim or "sgd")
    Trainer(model, args, callbacks=[callback], optimizers=(own, None))
    assert calls[0].get("optimizer", "adamw") == counted
    assert ("counts AdamW's state" in caplog.text) is (optim in ("rmsprop", None))
