"""cuBLAS's workspaces: memory of a GPU that the first products of a process take, and that stays.

torch gives each cuBLAS handle a workspace, and each thread that multiplies has a handle: the one that runs
the forward, and autograd's own. cuBLASLt, which adds biases, has one in the forward, and another in the
backward where blocks run again: both are counted. The sizes are torch's
(``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``CUDABlas.cpp``). Those of AMD's libraries are not known here.
"""

from __future__ import annotations

import os
import re

import torch
from torch import nn

_HANDLES = 2  # of the forward's thread, and of autograd's
_LT = 1024  # KiB
_LARGE, _SMALL = 32 * 2**20, (2 * 4096 + 8 * 16) * 2**10
_WITH_LARGE = (9, 10, 12)  # compute capabilities: Hopper and Blackwell


def workspace_sizes(model: nn.Module) -> tuple[int, ...]:
    """The workspaces of a process that trains the model on the GPU where it is, or will be; none on a CPU.

    A model on the meta device is planned for the GPU that is here, and without one for the largest default.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not (parameter.is_cuda or parameter.is_meta) or torch.version.hip:
        return ()
    major = _WITH_LARGE[0]
    if parameter.is_cuda or torch.cuda.is_available():
        major = torch.cuda.get_device_capability(parameter.device if parameter.is_cuda else None)[0]
    one = _of_one(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), major)
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")  # of KiB
    return _HANDLES * (one, (int(given) if given.isdecimal() else _LT) * 2**10)


def _of_one(config: str | None, major: int) -> int:
    """``":4096:2:16:8"``: 2 buffers of 4096 KiB and 8 of 16 KiB; what is no such text counts as none, as for
    torch."""
    buffers = re.findall(r":([0-9]+):([0-9]+)", config or "")
    if buffers:
        return sum(int(size) * int(count) for size, count in buffers) * 2**10
    return _LARGE if major in _WITH_LARGE else _SMALL
