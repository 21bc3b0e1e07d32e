"""A loop of one's own whose forward, loss and backward are CUDA graphs, so that they do not wait for Python.

Each batch must have the shape of the first one. On a CPU, which has no CUDA graphs, the loop runs without.
"""

import argparse
import time
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch import nn

import lowmem_patch
from lowmem_patch import patch_model

TINY_VIT = Path(lowmem_patch.__file__).parent / "assets" / "tiny-vit"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=f"local-dir:{TINY_VIT}")
parser.add_argument("--preset", default="auto")
parser.add_argument("--steps", type=int, default=20, help="at least 2; the second half is timed")
options = parser.parse_args()
if options.steps < 2:
    parser.error("--steps must be at least 2")
device = "cuda" if torch.cuda.is_available() else "cpu"


class WithLoss(nn.Module):
    """A graph takes and returns tensors alone; with the loss inside, its kernels belong to the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # without autocast's cache, which would hold casts beyond the graph in which they are made
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            return nn.functional.cross_entropy(self.model(pixels), labels)


torch.manual_seed(0)
held_out = load_file(TINY_VIT / "held_out.safetensors")
pixels = held_out["images"].float().div(8).sub(1).unsqueeze(1).to(device)  # grey levels 0 to 16
labels = held_out["labels"].long().to(device)

model = timm.create_model(options.model, pretrained=True).to(device).train()
with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
    model = patch_model(model, options.preset, example_inputs=pixels[:32])
step = WithLoss(model)
if device == "cuda":  # after the patch, and before DDP
    step = torch.cuda.make_graphed_callables(step, (pixels[:32], labels[:32]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # in few kernels


def now() -> float:
    """When all that was launched is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


start = now()
for number in range(options.steps):
    if number == options.steps // 2:
        start = now()
    rows = torch.arange(32, device=device).add(32 * number) % len(labels)
    loss = step(pixels[rows], labels[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
milliseconds = (now() - start) / (options.steps - options.steps // 2) * 1000
print(f"last loss {loss.item():.4f}; {milliseconds:.1f} ms a step on a {device}")
