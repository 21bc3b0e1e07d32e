"""A Trainer under DeepSpeed, on several processes, with the callback or without."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import LlamaForCausalLM, Trainer

from lowmem_patch.integrations import LowmemTrainerCallback
from tests.integrations.trainings import arguments, losses_of, token_rows, weights_of, whole_step
from tests.life.distributed_models import SavedBytes
from tests.support.models import llama

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--stage", type=int, required=True)
parser.add_argument("--preset")
parser.add_argument("--checkpoint", type=Path, help="loaded when DeepSpeed is set up already")
given = parser.parse_args()

# in the order of a script that builds its model itself; ``from_pretrained`` after the arguments asks ZeRO-3
model: Any = llama()
settings = arguments(
    given.out.parent / "trainer", max_grad_norm=0.0,
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        # small weights are taken apart as well
        "zero_optimization": {"stage": given.stage, "stage3_param_persistence_threshold": 0},
    },
)  # fmt: skip
if given.checkpoint is not None:
    model = LlamaForCausalLM.from_pretrained(given.checkpoint)
callbacks = [] if given.preset is None else [LowmemTrainerCallback(given.preset)]
trainer = Trainer(model, settings, train_dataset=token_rows(), callbacks=callbacks)
batch = torch.tensor([row["input_ids"] for row in token_rows(2)])
with SavedBytes(model) as bytes_of_batch:
    model(input_ids=batch, labels=batch)
before = weights_of(model)
with losses_of(trainer) as losses:
    trainer.train()
apart = sum(p.numel() < p.ds_numel for p in model.parameters() if hasattr(p, "ds_numel"))
with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=apart > 0):
    moved = whole_step(before, model, losses).gradients
result = {
    "losses": losses,
    "moved": moved,
    "saved": bytes_of_batch.count,
    "engine": type(trainer.model_wrapped).__name__,
    "apart": apart,
}
torch.save(result, given.out.with_suffix(f".{os.environ['RANK']}"))
