"""An image model of timm in a loop of one's own: patch after create_model, before the optimizer."""

import argparse
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

import lowmem_patch
from lowmem_patch import patch_model, patch_report, saved_bytes

TINY_VIT = Path(lowmem_patch.__file__).parent / "assets" / "tiny-vit"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=f"local-dir:{TINY_VIT}")
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

torch.manual_seed(0)
model = timm.create_model(options.model, pretrained=True).train()
model = patch_model(model, options.preset)
print(patch_report(model))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
held_out = load_file(TINY_VIT / "held_out.safetensors")
pixels = held_out["images"].float().div(8).sub(1).unsqueeze(1)  # grey levels 0 to 16
labels = held_out["labels"].long()

for step in range(options.steps):
    rows = torch.arange(32).add(32 * step) % len(labels)
    with saved_bytes(model) as saved:
        loss = torch.nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"last loss {loss.item():.4f}; a step saves {saved.activations:,} bytes of activations")
