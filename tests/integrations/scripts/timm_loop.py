"""A loop as timm's train script has one: create_model, an average of the weights, mixup."""

from __future__ import annotations

import numpy
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

from tests.integrations.scripts import common

arguments = common.parse()
torch.manual_seed(0)
numpy.random.seed(0)  # mixup draws from it
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4,
    num_classes=common.CLASSES,
).double()  # fmt: skip
if arguments.freeze:
    for block in model.blocks[:1]:
        block.requires_grad_(False)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9)
average = ModelEmaV3(model, decay=0.5)
mixup = Mixup(mixup_alpha=0.5, label_smoothing=0.1, num_classes=common.CLASSES)
loss_of = SoftTargetCrossEntropy()
losses, saved = [], 0
for pixels, labels in common.images():
    mixed, targets = mixup(pixels, labels)
    with common.SavedBytes(model) as bytes_of_step:
        logits = model(mixed)
    saved = saved or bytes_of_step.count
    loss = loss_of(logits, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)
    losses.append(float(loss.detach()))
common.leave(arguments, average.module, losses, saved)
