"""The bytes of all storages that are alive while a step runs, and their maximum in each part of it."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.tracing.live_storages import LiveStorages

FORWARD, LOSS, AFTER_LOSS = "forward", "loss", "after the loss"
BACKWARD, AFTER_BACKWARD, OPTIMIZER = "backward", "after the backward", "optimizer step"
MOMENTS = (FORWARD, LOSS, AFTER_LOSS, BACKWARD, AFTER_BACKWARD, OPTIMIZER)

# A moment, and a place among n repeated blocks: 0 in front of them, 1..n a block, n + 1 behind them.
Part = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class PartBytes:
    """Of one part of a step, model states but gradients excluded.

    Attributes:
        peak: the largest sum of all storages alive at one time.
        activations: the largest such sum without the gradients of parameters.
        gradients: of parameters, as they are when the part ends.
    """

    peak: int
    activations: int
    gradients: int


def most_of_moments(parts: Mapping[Part, PartBytes]) -> dict[str, int]:
    """The largest sum of each moment of the step, in their order."""
    return {
        moment: max(part.peak for (name, _), part in parts.items() if name == moment)
        for moment in MOMENTS
        if any(name == moment for name, _ in parts)
    }


class LiveBytes(LiveStorages):
    """The maximum is kept for each part of a step. ``place`` of a backward op is that of the forward op to
    which it belongs: autograd numbers its nodes in the order of the forward.
    """

    def __init__(
        self,
        model_states: Sequence[Tensor],
        gradients: Sequence[Tensor],
        packed: Sequence[Tensor] = (),
        *,
        on_gpu: bool = False,
    ) -> None:
        """``model_states`` are not counted, ``packed`` weights among them; ``gradients`` are held from the
        beginning."""
        super().__init__(model_states, packed, on_gpu=on_gpu)
        self.gradients = 0
        self.parts: dict[Part, list[int]] = {}
        self.moment, self.place = FORWARD, 0
        self.starts: list[tuple[int, int]] = []  # autograd's number where a place begins
        self.end = 0  # and where the forward ends
        for gradient in gradients:
            self.add(gradient)
        self.gradients = self.now
        self.parts.clear()
        self.enter(FORWARD, 0)

    def enter(self, moment: str, place: int) -> None:
        """The next allocations belong to this part."""
        if moment == BACKWARD and self.moment != BACKWARD:
            self.end = _next_number()
        elif moment == FORWARD:
            self.starts.append((_next_number(), place))
        self.settle()
        self.moment, self.place = moment, place
        self.grown(self.now)

    def begin(self, moment: str) -> None:
        """The next moment, at the present place."""
        self.enter(moment, self.place)

    def mark(self, moment: str) -> None:
        """What is alive right now is all of this moment."""
        self.settle()
        self.parts[moment, 0] = [self.now, self.now - self.gradients, self.gradients]

    def not_the_loss(self) -> None:
        """What was taken for the loss since the last module returned belongs to the forward."""
        for place in [place for moment, place in self.parts if moment == LOSS]:
            found = self.parts.pop((LOSS, place))
            known = self.parts.setdefault((FORWARD, place), found)
            known[:] = [max(pair) for pair in zip(known, found, strict=True)]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.moment == BACKWARD:
            self._find_place()
        return super().call(func, args, kwargs)

    def made_gradient(self, parameter: Tensor) -> None:
        """A hook: a parameter has its first gradient of this step."""
        if parameter.grad is not None:
            self.gradients += parameter.grad.numel() * parameter.grad.element_size()
            self.grown(self.now)

    def grown(self, now: int) -> None:
        sums = now, now - self.gradients, self.gradients
        known = self.parts.setdefault((self.moment, self.place), list(sums))
        for number, size in enumerate(sums):
            known[number] = max(known[number], size)

    def _find_place(self) -> None:
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        # a leaf's gradient has no number, and what is computed again has a later one: both stay here
        if number is None or not 0 <= number < self.end:
            return
        place = self.starts[bisect.bisect_right(self.starts, (number, 1 << 62)) - 1][1]
        if place != self.place:
            self.enter(BACKWARD, place)

    def result(self) -> dict[Part, PartBytes]:
        return {part: PartBytes(*sums) for part, sums in self.parts.items()}


def _next_number() -> int:
    """The number that autograd gives to its next node."""
    return int(torch._C._autograd._get_sequence_nr())
