"""Whether the weights of a head are still those of its forward, when somebody reads its logits.

A step of a fused optimizer leaves no trace on a weight. So a sum over the weight's bits is taken when its
gradient comes, before any step, where somebody still holds the logits. Who reads them later sums again.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import without_dispatch_modes
from lowmem_patch.nn.context import is_freed
from lowmem_patch.nn.gammas import is_capturing


class TrainedWeights:
    """Those that one forward of a head has read."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, weight: Tensor) -> None:
        """``weight`` has a place in the graph."""
        if isinstance(weight, FakeTensor):  # which has no values
            return
        self._weights.append(weight.detach())
        hook: Any = weight.register_hook  # has no types
        hook(partial(_note_gradient, weakref.ref(self)))

    def note(self) -> None:
        """A gradient has come to one of them."""
        if not self._sums and not self._are_freed():
            self._sums = [*map(_sum_of_bits, self._weights)]

    def are_others(self) -> bool:
        """Whether one was written since its gradient came; waits for the device."""
        if not self._sums or self._are_freed() or is_capturing(self._weights[0].device):
            return False
        pairs = zip(self._weights, self._sums, strict=True)
        return any(not torch.equal(_sum_of_bits(weight), first) for weight, first in pairs)

    def _are_freed(self) -> bool:
        """Whether FSDP has taken the memory of one away, which whoever computes logits will say."""
        return any(map(is_freed, self._weights))


def _note_gradient(weights: weakref.ref[TrainedWeights], gradient: Tensor) -> None:
    found = weights()
    if found is not None:
        found.note()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """``[]`` int64: the sum of the tensor's bits, read as integers.

    A change of one element always changes the sum; changes of several could only cancel by chance.
    """
    with torch.no_grad(), without_dispatch_modes():
        bits = tensor.contiguous().view(-1)
        whole = len(bits) * bits.itemsize % 8 == 0 and bits.data_ptr() % 8 == 0
        return bits.view(torch.int64 if whole else _INTEGERS[bits.itemsize]).sum()
