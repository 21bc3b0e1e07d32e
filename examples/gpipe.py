"""GPipe by torch.distributed.pipelining: patch the whole model, then cut it into stages.

torchrun --standalone --nproc-per-node 2 examples/gpipe.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from transformers import AutoModelForCausalLM

import lowmem_patch
from lowmem_patch import patch_model, patch_report

TINY_LLAMA = Path(lowmem_patch.__file__).parent / "assets" / "tiny-llama"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=str(TINY_LLAMA))
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")


class Stage(torch.nn.Module):
    """The layers of one process; the first one embeds, the last one has the head."""

    def __init__(self, llama):
        super().__init__()
        layers = llama.model.layers
        share = -(-len(layers) // stages)
        self.layers = layers[rank * share : (rank + 1) * share]
        self.rotary = llama.model.rotary_emb
        self.embed = llama.model.embed_tokens if rank == 0 else torch.nn.Identity()
        last = (llama.model.norm, llama.lm_head) if rank == stages - 1 else ()
        self.last = torch.nn.Sequential(*last)

    def forward(self, x):
        x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        for layer in self.layers:
            x = layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return self.last(x)


def next_token_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)  # the same adapters in every process
model = AutoModelForCausalLM.from_pretrained(options.model)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()
model = patch_model(model, options.preset)  # the whole model, before it is cut
if rank == 0:
    print(patch_report(model))

stage = Stage(model.get_base_model()).to(device)
schedule = ScheduleGPipe(
    PipelineStage(stage, rank, stages, device), n_microbatches=4, loss_fn=next_token_loss
)
optimizer = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-3)

text = (TINY_LLAMA / "README.md").read_bytes() * 16
rows = torch.frombuffer(bytearray(text[: len(text) // 128 * 128]), dtype=torch.uint8)
rows = rows.long().view(-1, 128).to(device)

for step in range(options.steps):
    batch = rows[torch.arange(8).add(8 * step) % len(rows)]
    losses = []
    if rank == 0:
        schedule.step(batch)
    elif rank == stages - 1:
        schedule.step(target=batch, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
if rank == stages - 1:
    print(f"last loss {float(torch.stack(losses).detach().mean()):.4f} in {stages} stages")
dist.destroy_process_group()
