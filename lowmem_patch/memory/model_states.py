"""Bytes of the model states (parameters, gradients, optimizer state), by arithmetic alone."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from typing import Any

import torch
from torch import nn

from lowmem_patch.errors import ConfigError
from lowmem_patch.memory.caching_allocator import rounding_bytes
from lowmem_patch.memory.optimizers import check_optimizer, state_sizes
from lowmem_patch.tracing.base_model import output_head
from lowmem_patch.tracing.quantised import held_beside, own_bytes

FEWEST_BYTES = 10_000  # of a budget: who writes a number below that means GiB
# QLoRA: 4 bits a weight, an 8-bit scale per 64 weights, a float32 scale per 256 of those scales
_WEIGHT_BLOCK, _SCALE_BLOCK = 64, 256
# cuBLAS's workspaces, by torch's ``aten/src/ATen/cuda/CublasHandlePool.cpp`` and ``CUDABlas.cpp``
_HANDLES = 2  # of the forward's thread, and of autograd's
_LT = 1024  # KiB
_LARGE, _SMALL = 32 * 2**20, (2 * 4096 + 8 * 16) * 2**10
_WITH_LARGE = (9, 10, 12)  # compute capabilities: Hopper and Blackwell
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
          "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,  # as for Docker and Slurm
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def parse_bytes(text: str) -> int:
    """``"24GiB"`` -> 25769803776; also MiB, ``24g`` (the same), GB (1000s), or B.

    Raises:
        ConfigError: it is no positive size.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = 0.0
    if number.isdecimal() and not unit and int(number):
        few = int(number) < FEWEST_BYTES
        mend = f"{number}GiB, or {number}B for bytes" if few else f"{number}B"
        raise ConfigError(f"{text!r} is a size of memory without a unit: write {mend}")
    if not (math.isfinite(size) and size >= 1):
        raise ConfigError(f"{text!r} is no size of memory: write it as 24GiB, 80GB or 900MiB")
    return int(size)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory goes.

    Attributes:
        optimizer: one of ``OPTIMIZERS``.
        quantised: the frozen Linears of the base model lie in 4 bits, doubly quantised, as in QLoRA.
        accumulates: a step adds to the gradients of an earlier batch.
        checkpointing: by the model's own switch, each layer's activations are computed again.
        gpus: over which FSDP2 shards the model states, block by block.
    """

    optimizer: str = "adamw"
    quantised: bool = False
    accumulates: bool = False
    checkpointing: bool = False
    gpus: int = 1


USUAL_TRAINING = Training()


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes that one GPU holds for the whole of training, of each tensor in the order of their allocation.

    Attributes:
        held: parameters and buffers, and what quantised weights hold beside them (scales).
        of_gradients: of the parameters that train, in their dtype, held between steps.
        of_optimizer: the state of the optimizer, which its first step makes.
        dequantised: the largest quantised weight in the compute dtype (0 without quantisation).
        workspaces: on a GPU, of cuBLAS.
        on_gpu: they are on a GPU, or will be.
        gpus: over which all but the workspaces is sharded.
        buckets: of DDP, a copy of the gradients.
    """

    held: tuple[int, ...] = ()
    of_gradients: tuple[int, ...] = ()
    of_optimizer: tuple[int, ...] = ()
    dequantised: int = 0
    workspaces: tuple[int, ...] = ()
    on_gpu: bool = False
    gpus: int = 1
    buckets: int = 0

    def share(self, size: int) -> int:
        """One GPU's part of so many bytes, rounded up."""
        return -(-size // self.gpus)

    @property
    def parameters(self) -> int:
        """Bytes of ``held``."""
        return self.share(sum(self.held))

    @property
    def gradients(self) -> int:
        return self.share(sum(self.of_gradients))

    @property
    def optimizer(self) -> int:
        return self.share(sum(self.of_optimizer))

    @property
    def workspace(self) -> int:
        return sum(self.workspaces)

    @functools.cached_property
    def rounding(self) -> int:
        """What a GPU's allocator rounds up for parameters and optimizer state alone."""
        sizes = (*self.held, *self.of_optimizer) if self.on_gpu else ()
        return rounding_bytes(map(self.share, sizes))

    def before_steps(self, accumulates: bool) -> tuple[int, ...]:
        """Bytes of each tensor that is held before the first step, in the order of their allocation."""
        buckets = self.of_gradients if self.buckets else ()
        earlier = self.of_gradients if accumulates else ()
        return *self.held, self.dequantised, *buckets, *self.workspaces, *earlier

    @property
    def counted(self) -> int:
        """All but the gradients, and but what is rounded up."""
        beside = self.dequantised + self.workspace + self.buckets
        return self.parameters + self.optimizer + beside

    @property
    def resident(self) -> int:
        """All but the gradients."""
        return self.counted + self.rounding


def _quantised_bytes(count: int) -> int:
    scales = -(-count // _WEIGHT_BLOCK)
    return -(-count // 2) + scales + -(-scales // _SCALE_BLOCK) * 4


def _packed_weights(model: Any) -> set[int]:
    """Ids of the weights that QLoRA packs: those of frozen Linears, except the model's head."""
    head = output_head(model)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {id(m.weight) for m in linears if not m.weight.requires_grad} - tied


def model_state_bytes(model: nn.Module, optimizer: str, *, quantised: bool = False) -> ModelStates:
    """Bytes of parameters, gradients and optimizer state; works on the meta device.

    Args:
        optimizer: one of ``OPTIMIZERS``. Torch's have their state in the parameters' dtype; of paged
            states, which may lie on the host, the small ones are counted that never do.
        quantised: count the frozen Linears of the base model in 4 bits, doubly quantised, as QLoRA.

    Raises:
        ConfigError: an unknown optimizer.
    """
    check_optimizer(optimizer)
    packed = _packed_weights(model) if quantised else set()
    held = list(map(own_bytes, model.buffers()))
    held += [tensor.untyped_storage().nbytes() for tensor in held_beside(model)]
    gradients: list[int] = []
    states: list[int] = []
    dequantised = 0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        if id(parameter) in packed:
            held.append(_quantised_bytes(parameter.numel()))
            dequantised = max(dequantised, size)
        else:
            held.append(own_bytes(parameter))
        if parameter.requires_grad:
            gradients.append(size)
            states += state_sizes(parameter, optimizer)
    on_gpu = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return ModelStates(
        tuple(held), tuple(gradients), tuple(states), dequantised, workspace_sizes(model), on_gpu
    )


def workspace_sizes(model: nn.Module) -> tuple[int, ...]:
    """cuBLAS's workspaces, which the first products of a process take on the GPU where the model is, or will
    be, and which stay; none on a CPU.

    torch gives each cuBLAS handle one, and each thread that multiplies has a handle. cuBLASLt, which adds
    biases, has one in the forward, and another in the backward where blocks run again: both are counted.
    Those of AMD's libraries are not known here. A model on the meta device is planned for the GPU that is
    here, and without one for the largest default.
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
