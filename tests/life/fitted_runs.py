"""Two processes: blocks that run again, under DDP and FSDP2, beside the same blocks as patched.

``python tests/life/fitted_runs.py FOLDER`` leaves ``fitted.pt`` in FOLDER: gradients by way and level.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import FAMILIES, llama_of
from tests.support.stacks import all_of, blocks_of, give_levels, patched
from tests.support.step import warned

WORLD = 2
LEVELS = ("attention", "checkpointed", "host", "segment", "halves")


def gradients(model: Any, inputs: Any) -> dict[str, Any]:
    model.zero_grad()
    with warned():
        model(**inputs).logits.float().square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name.removeprefix("module.")] = whole.clone()
    return found


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(rank: int, folder: Path) -> None:
    # a file, as two runs at a time would want one port
    meeting = (folder.resolve() / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model, inputs = llama_of(num_hidden_layers=4).train(), FAMILIES["llama"].inputs()
    blocks = blocks_of(model, inputs)
    model = patched(model, inputs)
    found: dict[str, Any] = {}
    for level in ("patched", *LEVELS):
        levels = {} if level == "patched" else all_of(blocks, level)
        fitted = give_levels(model, blocks, levels)
        for way, wrap in (("ddp", DistributedDataParallel), ("fsdp", sharded)):
            wrapped = wrap(copy.deepcopy(fitted))
            try:
                gradients(wrapped, inputs)  # a second step is another: buckets, prefetching
                found[f"{way} {level}"] = gradients(wrapped, inputs)
            except Exception as error:  # told by the test of this way and level
                found[f"{way} {level}"] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(found, folder / "fitted.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # forked, what is imported is imported once
    start_processes(run, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
