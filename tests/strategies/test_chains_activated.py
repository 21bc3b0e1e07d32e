"""An activation that is a module of its own is one more step of the chain that it reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.judge import assert_same_step
from tests.support.step import AUTOCAST, BF16, cast, warned
from tests.support.toys import WIDTH, rows

INNER = 2 * WIDTH
FULL = len(rows()) * INNER * 4


class Sparse(nn.Module):
    """As Gemma 3n's sparse MLPs: the gate is cut off at a number of each row, in front of the activation."""

    def __init__(self, act: nn.Module, body: Any) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down, self.other = nn.Linear(INNER, WIDTH), nn.Linear(INNER, WIDTH)
        self.act, self.body = act, body

    def cut(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        least = gate.mean(-1, keepdim=True) + 0.1 * gate.std(-1, keepdim=True)
        # a ReLU saves what it gives, which nobody may overwrite
        in_place = getattr(self.act, "inplace", getattr(self.act, "in_place", False))
        return (gate - least).clamp(min=0.0) if in_place else torch.relu(gate - least)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self, x)
        return result


def gated(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.down(net.act(net.cut(x)) * net.up(x))
    return result


def plain(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.down(net.act(net.cut(x)))
    return result


def read_before(net: Any, x: Tensor) -> Tensor:
    cut = net.cut(x)
    result: Tensor = net.down(net.act(cut)) + net.other(cut)
    return result


def read_otherwise(net: Any, x: Tensor) -> Tensor:
    made = net.act(net.cut(x))
    result: Tensor = net.down(made) + made.square().sum(-1, keepdim=True) + made[:, :WIDTH]
    return result


def hooked(net: Any, x: Tensor) -> Tensor:
    cut = net.cut(x)
    cut.register_hook(lambda gradient: 3.0 * gradient)
    made = net.act(cut)
    made.register_hook(lambda gradient: 2.0 * gradient)
    result: Tensor = net.down(made)
    return result


def written(net: Any, x: Tensor) -> Tensor:
    made = net.act(net.cut(x))
    made.mul_(2.0)
    result: Tensor = net.down(made)
    return result


def dropped(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.down(torch.dropout(net.act(net.cut(x)), 0.3, net.training))
    return result


BODIES = (gated, plain, read_before, read_otherwise, hooked, written, dropped)
ACTIVATIONS = {
    "gelu": nn.GELU(),
    "tanh gelu": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "sigmoid": nn.Sigmoid(),
    "relu6 in place": nn.ReLU6(inplace=True),
    "silu in place": nn.SiLU(inplace=True),
}


def network(act: str, body: Any = gated) -> Any:
    torch.manual_seed(0)
    block = Sparse(copy.deepcopy(ACTIVATIONS[act]), body)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, 3))


def patched(model: Any) -> Any:
    return patch_model(model, "exact", example_inputs=(rows(),))


USES = [
    (act, body)
    for act in ACTIVATIONS
    for body in BODIES
    if (act, body) != ("sigmoid", written)  # an error of torch
]


# who reads what an activation in place overwrites, on a path that was not planned, reads it as it was
@pytest.mark.parametrize(("act", "body"), [u for u in USES if u != ("silu in place", read_before)])
def test_any_use_of_the_value_is_right(act: str, body: Any) -> None:
    """Planned on the gated product, so that each other use meets deferred tensors unforeseen."""
    model = network(act)
    model[1].body = body
    twin = copy.deepcopy(model)
    model[1].body = gated
    patched(model)
    model[1].body = body
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize(("act", "body"), USES)
def test_plans_of_any_use_are_right(act: str, body: Any) -> None:
    model = network(act, body)
    twin = copy.deepcopy(model)
    with warned():
        patched(model)
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_what_enters_the_chain_is_saved(act: str) -> None:
    model = patched(network(act))
    assert "1" in [site.name for site in patch_report(model).sites if site.kind == "chain"]
    with saved_bytes(model) as counted:
        model(rows())
    numbers = 2 * len(rows()) * 4  # the deviation of each row, and where it is cut off
    assert counted.activations == 3 * len(rows()) * WIDTH * 4 + 2 * FULL + numbers


@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
@pytest.mark.parametrize("body", [gated, plain])
def test_low_precision(body: Any, mode: Any) -> None:
    model = cast(network("gelu", body), mode.weights)
    twin = copy.deepcopy(model)
    x = rows().to(mode.weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, "exact", example_inputs=(x,))
    assert_same_step(model, twin, x, mode)


@pytest.mark.parametrize("body", [gated, plain, read_before])
def test_compiled(body: Any) -> None:
    model = network("gelu", body)
    twin = copy.deepcopy(model)
    patched(model)
    assert_same_step(torch.compile(model, backend="aot_eager"), twin, rows())
