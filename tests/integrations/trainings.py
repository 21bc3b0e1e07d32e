"""A training by somebody's trainer: its losses, what it changed in the weights, and the bytes of one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lowmem_patch import saved_bytes
from tests.support.judge import assert_gradients, assert_outputs
from tests.support.step import FP32, Mode, StayInFloat64, Step, cast

# what starts several processes, beside what an ordinary run of the tests has of that kind already
SEVERAL_PROCESSES = pytest.mark.skipif(
    "LOWMEM_PATCH_INTEGRATIONS" not in os.environ, reason="make test-integrations"
)
STEPS = 4
ROWS, LENGTH = 2, 12


def token_rows(count: int = 16, length: int = LENGTH, seed: int = 5) -> list[dict[str, Any]]:
    """Rows of a language model's training set."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, 60, (count, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Four steps of SGD on a CPU: AdamW would turn the rounding of a small gradient into a whole step."""
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 0.1, "optim": "sgd",
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "logging_steps": 1,
        "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**settings, **changes})


def whole_step(weights_before: dict[str, Any], model: nn.Module, losses: list[float]) -> Step:
    """The losses as outputs, and as gradients what the training did to each weight that trains."""
    moved = {
        name: p.detach().double() - weights_before[name]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return Step([torch.tensor(losses, dtype=torch.float64)], moved)


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def trained_by(make: Callable[[], Trainer], **train: Any) -> Step:
    """What ``trainer.train()`` of a fresh trainer does, and the saved bytes of its loss on one batch."""
    torch.manual_seed(0)
    trainer = make()
    model: Any = trainer.model
    before = weights_of(model)
    with losses_of(trainer) as losses:
        trainer.train(**train)
    return whole_step(before, model, losses)._replace(saved=bytes_of_batch(trainer))


@contextlib.contextmanager
def losses_of(trainer: Any) -> Iterator[list[float]]:
    """The loss of each training step, as it was computed: a log may round it."""
    losses: list[float] = []
    compute = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = training_step
    yield losses
    del trainer.training_step


def bytes_of_batch(trainer: Any) -> int:
    """The bytes that autograd saves for the first batch."""
    model = trainer.model
    model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = trainer._prepare_inputs(batch)
    with trainer.compute_loss_context_manager(), saved_bytes(model) as saved:
        trainer.compute_loss(model, inputs)
    return saved.activations


def truth_by(make: Callable[[], Trainer]) -> Step:
    """The same training in float64."""
    torch.manual_seed(0)
    trainer = make()
    model: Any = cast(trainer.model, torch.float64)
    before = weights_of(model)
    with StayInFloat64(), losses_of(trainer) as losses:
        trainer.train()
    return whole_step(before, model, losses)


def assert_same_training(found: Step, own: Step, truth: Step, mode: Mode = FP32) -> None:
    """Losses and changes of weights are as near to float64's as the unpatched model's."""
    assert len(found.outputs[0]) == len(truth.outputs[0]) > 1
    # a training that moves nothing proves nothing
    assert any(float(change.abs().max()) > 0 for change in truth.gradients.values())
    assert_outputs(found, own, truth, mode)
    assert_gradients(found, own, truth, mode)
