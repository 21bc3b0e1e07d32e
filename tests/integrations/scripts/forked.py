"""``forked.py OWN PATCHED``: the loop with accelerate on two processes, without a patch and with one.

The processes find in their environment what torchrun puts there, and are forked from one that has imported
the libraries, once for all of them.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

import accelerate  # noqa: F401
import timm  # noqa: F401
import torch
from torch.multiprocessing import start_processes
from transformers import Trainer, ViTForImageClassification  # noqa: F401

WORLD = 2
LOOP = str(Path(__file__).with_name("accelerate_loop.py"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def train(rank: int, port: int, out: str, patched: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
    )  # fmt: skip
    sys.path[:0] = [str(Path(LOOP).parent)]
    sys.argv = [LOOP, "--out", out]
    if not patched:
        runpy.run_path(LOOP, run_name="__main__")
        return
    sys.argv = ["lowmem_patch", "run", "--preset", "exact", "--strict", *sys.argv]
    try:
        runpy.run_module("lowmem_patch", run_name="__main__")
    except SystemExit as stopped:
        if stopped.code:
            raise RuntimeError(f"lowmem-patch run ended with {stopped.code}") from stopped


if __name__ == "__main__":
    own, with_patch = sys.argv[1:]
    for out, patched in ((own, False), (with_patch, True)):
        start_processes(train, (free_port(), out, patched), nprocs=WORLD, start_method="fork")
