"""A checkpointed block that is given an activation's output: its later run may get an ordinary tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from tests.support.judge import assert_rounded
from tests.support.step import DOUBLE, step
from tests.support.toys import WIDTH, rows

MAKERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda net, x: F.silu(net.enter(x)),
    "module": lambda net, x: net.act(net.enter(x)),
    "gated": lambda net, x: F.silu(net.enter(x)) * net.up(x),
    "norm": lambda net, x: net.norm(net.enter(x)),
    "dropped norm": lambda net, x: net.drop(net.norm(net.enter(x))),
}


class Block(nn.Module):
    def __init__(self, made: str) -> None:
        super().__init__()
        self.enter, self.up, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act, self.norm, self.drop = nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.5)
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.leave, MAKERS[self.made](self, x), use_reentrant=False)
        return h


def alone(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y


def in_a_block(model: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(model, x, use_reentrant=False)
    return y


def with_copies(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda copy: copy):
        return alone(model, x)


def on_cpu(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return alone(model, x)


@pytest.mark.parametrize("way", [alone, in_a_block, with_copies, on_cpu])
@pytest.mark.parametrize("preset", ["exact", "compact"])
@pytest.mark.parametrize("made", MAKERS)
def test_a_block_that_reads_what_was_made_outside(
    made: str, preset: str, way: Callable[[Any, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(made))
    stock, x = copy.deepcopy(model), rows()
    patch_model(model, preset, example_inputs=(x,))
    results = []
    for one in (model, stock):
        torch.manual_seed(1)  # of the dropout
        way(one, x).square().mean().backward()
        results.append([p.grad for p in one.parameters() if p.grad is not None])
    for ours, theirs in zip(*results, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        # 8 bits have a 254th of the largest value; else sums of float32 in another order
        assert error <= (0.01 if preset == "compact" else 1e-6)


class Scaled(nn.Module):
    """Blocks whose outputs are read outside of them: a chain's value, and a Linear's that is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.condition, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale, self.act = nn.Parameter(torch.ones(WIDTH)), nn.GELU()

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + gate * self.up(x)[..., :WIDTH] + gate.square() * self.down(self.act(self.up(x)))

    def branch(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        gate = self.condition(x).sigmoid()
        x = checkpoint(self.gated, self.enter(x), gate, use_reentrant=False)
        y = checkpoint(self.branch, x, use_reentrant=False)
        h: Tensor = self.leave(x) + self.scale * y
        return h


def test_who_reads_what_a_block_returns_saves_nothing_of_the_block() -> None:
    torch.manual_seed(0)
    twin = Scaled()
    model = copy.deepcopy(twin)
    patch_model(model, "exact", example_inputs=(rows(),))
    found, expected = (
        step(one, rows(), DOUBLE, count=True) for one in (model.double(), twin.double())
    )
    assert found.saved <= expected.saved
    assert_rounded(found, expected)
