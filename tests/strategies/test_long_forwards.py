"""A forward of more than 100 torch functions is looked at where that saves a good part of what it holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model
from tests.support.judge import assert_same_step
from tests.support.step import step
from tests.support.toys import WIDTH, rows

CONFIG = {"norms": "keep", "activations": "recompute"}
ROW = len(rows()) * WIDTH * 4


class Attention(nn.Module):
    """What stands for attention is gated, as in AX-K2; ``functions`` choose tokens without a gradient."""

    def __init__(self, functions: int, others: int, clamps: bool) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.others = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(others)))
        self.functions, self.clamps = functions, clamps

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.functions):
                x.sum()
        gate = self.gate(x)
        gate = gate.clamp(max=0.2) if self.clamps else gate
        y: Tensor = self.out(self.value(x) * torch.sigmoid(gate))
        return self.others(y)


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize(
    ("functions", "others", "taken"),
    [(80, 0, True), (80, 60, True), (120, 0, True), (120, 100, False), (210, 0, False)],
)
def test_how_many_functions_a_forward_may_call(
    functions: int, others: int, taken: bool, clamps: bool
) -> None:
    torch.manual_seed(0)
    functions -= others  # which call one each
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(functions, others, clamps))
    model.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 3)))
    twin = copy.deepcopy(model)
    patch_model(model, CONFIG, example_inputs=(rows(),))
    found, expected = (step(net, rows(), count=True).saved for net in (model, twin))
    # the product is saved no more, and a clamped gate neither; nor in any case SiLU's output
    assert expected - found == ROW * (1 + (1 + clamps if taken else 0))
    assert_same_step(model, twin, rows())


def test_gains_are_counted_against_what_the_module_holds() -> None:
    """And not against the model, of whose bytes each of many layers has few."""
    torch.manual_seed(0)
    layers: Any = [Attention(120, 0, False) for _ in range(12)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
    twin = copy.deepcopy(model)
    patch_model(model, CONFIG, example_inputs=(rows(),))
    found, expected = (step(net, rows(), count=True).saved for net in (model, twin))
    assert expected - found == 12 * ROW
