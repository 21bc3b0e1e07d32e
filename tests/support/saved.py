"""Saved bytes of a function, by unique storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def saved_storages(function: Callable[[], Any]) -> tuple[Any, dict[int, int]]:
    """The function's result and the bytes of each storage that autograd keeps for it."""
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # a freed address could be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, storages


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
