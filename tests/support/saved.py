"""What the tests of the ops share: error budgets from data, saved bytes by unique storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def assert_within_budget(
    ours: Tensor, theirs: Tensor, exact: Tensor, extra: Tensor | float = 0.0
) -> None:
    """Our error is at most twice torch's own error in the same dtype, plus rounding.

    The rounding band is one unit of the result's dtype at each element, and one of float32, in
    which all arithmetic runs, at the scale of the tensor. ``extra`` is what the method itself costs,
    computed from the data.
    """
    assert ours.dtype == theirs.dtype
    assert ours.shape == exact.shape
    if exact.numel() == 0:
        return
    exact = exact.double()
    band = torch.finfo(ours.dtype).eps * exact.abs()
    band = band + torch.finfo(torch.float32).eps * exact.abs().max()
    budget = 2 * ((theirs.double() - exact).abs() + band + extra)
    error = (ours.double() - exact).abs()
    worst = (error - budget).argmax()
    assert bool((error <= budget).all()), (
        f"error {error.flatten()[worst]:.3e} over budget {budget.flatten()[worst]:.3e} "
        f"at value {exact.flatten()[worst]:.6f}"
    )


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
