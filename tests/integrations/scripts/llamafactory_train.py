"""LLaMA-Factory's own training of a YAML file, as its launcher starts it, watched by a callback."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.tuner import run_exp
from omegaconf import OmegaConf
from transformers import TrainerCallback

from lowmem_patch import saved_bytes
from tests.integrations.trainings import weights_of
from tests.support.step import StayInFloat64, cast

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--double", action="store_true")
arguments = parser.parse_args()


class Watch(TrainerCallback):
    """Leaves the losses, the weights before and after, and the bytes of a batch for the test to read."""

    result: dict[str, Any]

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if arguments.double:
            cast(model, torch.float64)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **loaders: Any
    ) -> None:
        model.train()
        batch = next(iter(loaders["train_dataloader"]))
        with saved_bytes(model) as saved:
            model(**batch)
        torch.manual_seed(args.seed)
        self.result = {"before": weights_of(model), "saved": saved.activations}

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        trains = {name for name, p in model.named_parameters() if p.requires_grad}
        after = {name: value for name, value in weights_of(model).items() if name in trains}
        torch.save({**self.result, "losses": losses, "after": after}, arguments.out)


config: Any = OmegaConf.to_container(OmegaConf.load(arguments.config))
with StayInFloat64() if arguments.double else contextlib.nullcontext():
    run_exp(config, callbacks=[Watch()])
