"""Stacks of blocks whose saved tensors wait in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowmem_patch.nn.host_memory import HostMemory
from tests.support.stacks import WIDTH, Stack, all_of, blocks_of, give_levels, rows

COUNT = 6


class Saving(nn.Module):
    """Its Linear saves what the block is given, tanh what it gives."""

    made: list[StorageWeakRef]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        self.made.append(StorageWeakRef(hidden.untyped_storage()))
        return torch.tanh(self.second(hidden))


def saving(between: Callable[[Any], Any] = lambda x: x) -> Any:
    torch.manual_seed(0)
    Saving.made = []
    return Stack((Saving() for _ in range(COUNT)), between).train()


def offloaded(model: Any, lag: int = 1, level: str = "offloaded") -> Any:
    blocks = dataclasses.replace(blocks_of(model, rows()), lag=lag)
    return give_levels(model, blocks, all_of(blocks, level))


def memory_of(model: Any) -> HostMemory:
    memory: HostMemory = model.blocks[0].forward.args[1].host
    return memory


def gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
