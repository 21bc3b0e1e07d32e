"""Activations whose readers save nothing of them are computed before one asks; all others wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from lowmem_patch import patch_model
from lowmem_patch.nn.activations import RecomputedActivation
from lowmem_patch.nn.deferred import Stored, Unstored
from tests.support.judge import assert_same_step


class Net(nn.Module):
    def __init__(self, act: nn.Module, read: Any) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False)
        self.act, self.down = act, nn.Linear(32, 8)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.read(self, self.act(self.gate(x)), x)
        return y


def into_a_linear(net: Net, a: Tensor, x: Tensor) -> Tensor:
    y: Tensor = net.down(a)
    return y


def into_a_product(net: Net, a: Tensor, x: Tensor) -> Tensor:
    y: Tensor = net.down(a * net.up(x))
    return y


def into_a_norm(net: Net, a: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(a, (32,))


@pytest.mark.parametrize(
    ("act", "read", "sources"),
    [
        (nn.GELU(), into_a_linear, 1),
        (nn.SiLU(), into_a_product, 2),
        (QuickGELUActivation(), into_a_linear, 0),  # torch has no operator of its own
        (nn.GELU(), into_a_norm, 0),  # saves the values
    ],
)
def test_the_plan_knows_the_readers(act: nn.Module, read: Any, sources: int) -> None:
    x = torch.randn(2, 5, 8)
    net = Net(act, read)
    patch_model(net, "exact", example_inputs=(x,))
    assert isinstance(net.act, RecomputedActivation)
    assert net.act.op.at_once == sources
    made = net.act(torch.randn(5, 32, requires_grad=True) * 1)
    assert type(made) is (Stored if sources == 1 else Unstored)


class Both(Net):
    """A function whose values wait, and a module that calls the same function."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(F.layer_norm(F.gelu(self.up(x)), (32,)))
        y: Tensor = self.down(self.act(self.gate(h)))
        return y


def test_it_is_computed_below_the_mode_that_replaces_a_function() -> None:
    net = Both(nn.GELU(), None)
    net.narrow = nn.Linear(32, 8)
    x = torch.randn(2, 5, 8)
    model = nn.Sequential(net)
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=(x,))
    assert "forward" in vars(net)  # runs under such a mode
    assert type(net.act) is RecomputedActivation
    assert net.act.op.at_once
    made: list[type] = []
    net.act.register_forward_hook(lambda _module, _args, output: made.append(type(output)))
    assert_same_step(model, stock, x)
    assert made == [Stored]
