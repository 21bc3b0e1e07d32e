"""Error budgets from float64: ours may be a small factor of the unpatched model's own error."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from zoo.precision import Precision
from zoo.steps import Step

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


@dataclasses.dataclass
class Comparison:
    """The tensor that is worst against its budget, with the unpatched model's error on it."""

    error: float = 0.0
    own: float = 0.0
    allowed: float = 0.0
    where: str = ""
    jump: float = math.inf  # errors of the unpatched model that leave a tensor undecided
    tensors: int = 0
    jumps: int = 0  # of these tensors, how many the unpatched model itself leaves undecided

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # not for NaN

    @property
    def excess(self) -> float:
        return self.error / self.allowed if self.allowed else 0.0

    def add(self, error: float, own: float, allowed: float, where: str) -> None:
        """One more tensor: kept if it is further beyond its budget; no number is the worst."""
        self.tensors += 1
        if own > self.jump:
            self.jumps += 1
            return
        new = Comparison(error, own, allowed, where)
        if not math.isnan(self.excess) and not new.excess <= self.excess:
            self.error, self.own, self.allowed, self.where = error, own, allowed, where


def _relative(found: Tensor, exact: Tensor, size: float) -> float:
    return float((found - exact).norm()) / max(size, 1e-30)


def compare_outputs(
    precision: Precision, found: Step, own: Step, truth: Step, noise: list[Step]
) -> Comparison:
    """Relative L2 errors of the outputs against the truth.

    ``noise`` holds steps of unpatched models with jittered weights: what one rounding may do.
    """
    shapes = [[t.shape for t in step.outputs] for step in (truth, found, own, *noise)]
    if any(shape != shapes[0] for shape in shapes[2:]):  # it picks other points, or more of them
        return Comparison(tensors=len(shapes[1]), jumps=len(shapes[1]))
    if shapes[1] != shapes[0]:
        return Comparison(float("nan"), where="the outputs have other shapes")
    worst = Comparison(jump=precision.jump)
    for index, exact in enumerate(truth.outputs):
        size = float(exact.norm())
        error = _relative(found.outputs[index], exact, size)
        others = [_relative(s.outputs[index], exact, size) for s in (own, *noise)]
        allowed = FORWARD_FACTOR * max(others) + precision.band
        worst.add(error, max(others), allowed, f"output {index}")
    return worst


def compare_gradients(
    precision: Precision, found: Step, own: Step, truth: Step, noise: list[Step]
) -> Comparison:
    """Each parameter's gradient; one that is 0 in exact arithmetic (a key's bias) is judged by the others.

    Errors are measured against at least the model's mean gradient, and the budget is at least that
    of all gradients together.
    """
    if set(found.gradients) != set(truth.gradients):
        odd = sorted(set(found.gradients) ^ set(truth.gradients))
        return Comparison(float("nan"), where=f"gradients of other parameters: {odd[:3]}")
    if not truth.gradients:
        return Comparison()
    squares = sum(float(t.square().sum()) for t in truth.gradients.values())
    mean = (squares / sum(t.numel() for t in truth.gradients.values())) ** 0.5
    overall = max(_overall(step, truth) for step in (own, *noise))
    worst = Comparison(jump=precision.jump)
    for name, exact in truth.gradients.items():
        size = max(float(exact.norm()), mean * exact.numel() ** 0.5)
        error = _relative(found.gradients[name], exact, size)
        others = [_relative(s.gradients[name], exact, size) for s in (own, *noise)]
        allowed = GRADIENT_FACTOR * max(*others, overall) + precision.band
        worst.add(error, max(*others, overall), allowed, name)
    return worst


def _overall(step: Step, truth: Step) -> float:
    squares = sum(float(t.square().sum()) for t in truth.gradients.values())
    wrong = sum(float((step.gradients[n] - t).square().sum()) for n, t in truth.gradients.items())
    return float((wrong / max(squares, 1e-60)) ** 0.5)
