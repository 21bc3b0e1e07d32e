"""A callback that watches a training from within, for trainers that are started by a command.

``WATCH_OUT`` names the file for the result; with ``WATCH_DOUBLE`` the training is one in float64.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from transformers import TrainerCallback

from lowmem_patch import saved_bytes
from tests.integrations.trainings import weights_of
from tests.support.step import StayInFloat64, cast

_READ = ("input_ids", "attention_mask", "position_ids", "labels")


class Watch(TrainerCallback):
    """Leaves the losses, what happened to the weights that train, and the bytes of a batch.

    ``fills``: adapters begin with the same values in each run, for a trainer that draws them without a seed.
    """

    def __init__(self, *, fills: bool = False) -> None:
        self.fills = fills
        self.double = "WATCH_DOUBLE" in os.environ
        self.contexts = contextlib.ExitStack()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.fills:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.uniform_(-0.1, 0.1, generator=generator)
        if self.double:
            cast(model, torch.float64)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **loaders: Any
    ) -> None:
        if self.double:
            self.contexts.enter_context(StayInFloat64())
        batch = next(iter(loaders["train_dataloader"]))
        with saved_bytes(model.train()) as saved:
            model(**{name: batch[name] for name in _READ if name in batch})
        self.saved, self.before = saved.activations, weights_of(model)
        torch.manual_seed(args.seed)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.contexts.close()
        after = weights_of(model)
        moved = {
            name: after[name] - self.before[name]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        losses = [float(entry["loss"]) for entry in state.log_history if "loss" in entry]
        result = {"losses": losses, "moved": moved, "saved": self.saved}
        torch.save(result, os.environ["WATCH_OUT"])
