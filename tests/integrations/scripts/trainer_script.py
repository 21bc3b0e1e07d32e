"""A script around transformers' Trainer, which ends with an exit code of its own."""

from __future__ import annotations

import sys

import torch
from transformers import Trainer, TrainingArguments, ViTForImageClassification

from tests.integrations.scripts import common
from tests.support.models import vit_config

arguments = common.parse()
torch.manual_seed(0)
model = ViTForImageClassification(vit_config(num_labels=common.CLASSES)).double()
rows = [
    {"pixel_values": image, "labels": label}
    for pixels, labels in common.images()
    for image, label in zip(pixels, labels, strict=True)
]
settings = TrainingArguments(
    str(arguments.out.parent / "trainer"), max_steps=common.STEPS, per_device_train_batch_size=common.ROWS,
    optim="sgd", learning_rate=0.1, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
    disable_tqdm=True, lr_scheduler_type="constant",
)  # fmt: skip
trainer = Trainer(model, settings, train_dataset=rows)
with common.SavedBytes(model) as bytes_of_step:
    model(pixel_values=common.images()[0][0])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
common.leave(arguments, model, losses, bytes_of_step.count)
sys.exit(7)
