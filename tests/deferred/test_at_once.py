"""Activations whose readers save nothing of them are computed before one asks; all others wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from lowmem_patch import patch_model
from lowmem_patch.nn.activations import RecomputedActivation
from lowmem_patch.nn.deferred import Stored, Unstored


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
