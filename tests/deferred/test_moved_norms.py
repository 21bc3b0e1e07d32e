"""A norm that waits behind row moves computes with what its forward had, whatever its module has later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from lowmem_patch import patch_model
from tests.support.judge import assert_rounded
from tests.support.models import randomise
from tests.support.step import Step

WIDTH = 8
Life = Callable[[Any, Tensor], Tensor]


class Moved(nn.Module):
    """The first dimension of a norm's output moves, as that of XLNet's last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = (
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4),
        )
        self.seen = False

    def normed(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.enter(x) + x).transpose(0, 1)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.normed(x)
        out: Tensor = self.leave(y.contiguous())
        return (
            out + y.sum(-1, keepdim=True) * self.seen if self.seen else out
        )  # a reader of the values


class Normed(nn.Module):
    """The part of the model before the last Linear."""

    def __init__(self, model: Moved) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.normed(x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter * 2 + 0.25 for name, parameter in model.named_parameters()}


def given(model: Any, x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, others(model), (x,))
    return out


def given_frozen(model: Any, x: Tensor) -> Tensor:
    model.requires_grad_(False)
    return given(model, x)


def given_and_read_outside(model: Any, x: Tensor) -> Tensor:
    part = Normed(model)
    return model.leave(functional_call(part, others(part), (x,)))  # type: ignore[no-any-return]


def parametrized(model: Any, x: Tensor) -> Tensor:
    parametrize.register_parametrization(model.norm, "weight", Doubled())
    return model(x)  # type: ignore[no-any-return]


def replaced(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    model.norm.weight = nn.Parameter(model.norm.weight.detach() * 3)
    return out


def with_another_eps(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    model.norm.eps = 1.0
    return out


def with_a_hook_on_gamma(model: Any, x: Tensor) -> Tensor:
    model.norm.weight.register_hook(lambda dy: dy * 2)
    return model(x)  # type: ignore[no-any-return]


LIVES: tuple[Life, ...] = (
    given, given_frozen, given_and_read_outside, parametrized, replaced, with_another_eps,
    with_a_hook_on_gamma,
)  # fmt: skip


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("life", LIVES)
def test_gradients_are_those_of_the_forwards_parameters(life: Life, seen: bool) -> None:
    x = torch.linspace(-2, 2, 96, dtype=torch.float64).sin().view(3, 4, WIDTH)
    model = randomise(Moved()).double()
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=x)
    assert patched.norm.use.behind_row_moves
    found = []
    for each in (patched, model):
        each.seen = seen
        leaf = x.clone().requires_grad_()
        out = life(each, leaf)
        out.square().sum().backward()
        own = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        found.append(Step([out.detach()], own | {"input": leaf.grad}))
    assert_rounded(*found)
