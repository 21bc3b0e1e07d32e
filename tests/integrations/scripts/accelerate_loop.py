"""A loop with accelerate, on one process or several, with DDP or FSDP2 as it was launched."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType, PartialState
from transformers import ViTForImageClassification

from tests.integrations.scripts import common
from tests.support.models import vit_config

arguments = common.parse()
if arguments.fsdp2:
    # accelerate has FSDP2 for accelerators alone, torch for CPUs as well
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
torch.manual_seed(0)
accelerator = Accelerator(cpu=not arguments.fsdp2)
config = vit_config(num_labels=common.CLASSES)
model = ViTForImageClassification(config).double().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
model, optimizer = accelerator.prepare(model, optimizer)
batches = common.images(accelerator.process_index)
losses, saved = common.fit(model, optimizer, batches, accelerator.backward)
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    kind = "FSDP2" if accelerator.is_fsdp2 else accelerator.distributed_type.value
    kind += f" of {accelerator.num_processes}"
    result = {"losses": losses, "saved": saved, "weights": state, "kind": kind}
    torch.save(result, arguments.out)
accelerator.wait_for_everyone()
accelerator.end_training()
