"""FSDP2 by accelerate: patch before prepare, which shards the model.

    accelerate launch --num-processes 2 --use-fsdp --fsdp-version 2 \\
        --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP \\
        --fsdp-transformer-layer-cls-to-wrap LlamaDecoderLayer examples/fsdp2_accelerate.py
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import lowmem_patch
from lowmem_patch import patch_model, patch_report

TINY_LLAMA = Path(lowmem_patch.__file__).parent / "assets" / "tiny-llama"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=str(TINY_LLAMA))
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

# accelerate has FSDP2 for accelerators alone: on a CPU this is data parallel
accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
model = patch_model(model, options.preset)
if accelerator.is_main_process:
    print(patch_report(model))

# foreach=False: torch's update of all weights at once takes no mixture of sharded and whole ones
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
model, optimizer = accelerator.prepare(model, optimizer)

text = (TINY_LLAMA / "README.md").read_bytes() * 16
rows = torch.frombuffer(bytearray(text[: len(text) // 128 * 128]), dtype=torch.uint8)
rows = rows.long().view(-1, 128)[accelerator.process_index :: accelerator.num_processes]

for step in range(options.steps):
    batch = rows[torch.arange(4).add(4 * step) % len(rows)].to(accelerator.device)
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
kind = accelerator.distributed_type.value  # FSDP, or MULTI_CPU
count = accelerator.num_processes
where = "one process" if count == 1 else f"{count} processes, {kind}"
accelerator.print(f"last loss {float(loss.detach()):.4f} on {where}")
accelerator.wait_for_everyone()
accelerator.end_training()
