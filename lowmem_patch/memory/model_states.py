"""Bytes of the model states (parameters, gradients, optimizer state), by arithmetic alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn

from lowmem_patch.errors import ConfigError
from lowmem_patch.memory.caching_allocator import rounding_bytes
from lowmem_patch.memory.cublas import workspace_sizes
from lowmem_patch.memory.optimizers import check_optimizer, state_sizes
from lowmem_patch.tracing.base_model import output_head
from lowmem_patch.tracing.quantised import held_beside, own_bytes

FEWEST_BYTES = 10_000  # of a budget: who writes a number below that means GiB
# QLoRA: 4 bits a weight, an 8-bit scale per 64 weights, a float32 scale per 256 of those scales
_WEIGHT_BLOCK, _SCALE_BLOCK = 64, 256
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
class StateSizes:
    """Bytes of each tensor that is held for the whole of training, in the order of their allocation.

    Attributes:
        held: parameters and buffers, and what quantised weights hold beside them.
        workspaces: of cuBLAS.
        gradients: of the parameters that train.
        optimizer: the state of the optimizer, which its first step makes.
        on_gpu: they are on a GPU, or will be.
    """

    held: tuple[int, ...] = ()
    workspaces: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    on_gpu: bool = False


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes that are held for the whole of training.

    Attributes:
        parameters: and buffers, and what quantised weights hold beside them (scales).
        gradients: of the parameters that train, in their dtype, held between steps.
        optimizer: the state of the optimizer.
        dequantised: the largest quantised weight in the compute dtype (0 without quantisation).
        workspace: on a GPU, of cuBLAS.
        rounding: what a GPU's allocator rounds up for parameters and optimizer state alone.
        sizes: of the single tensors.
        buckets: of DDP, a copy of the gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    dequantised: int = 0
    workspace: int = 0
    rounding: int = 0
    sizes: StateSizes = StateSizes()
    buckets: int = 0

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
    workspaces = workspace_sizes(model)
    on_gpu = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return ModelStates(
        sum(held),
        sum(gradients),
        sum(states),
        dequantised,
        sum(workspaces),
        rounding_bytes((*held, *states)) if on_gpu else 0,
        StateSizes((*held, dequantised), workspaces, tuple(gradients), tuple(states), on_gpu),
    )
