"""Chains whose values somebody writes into, and chains beside others that cannot wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes
from tests.support.chained import (
    FULL,
    HIDDEN,
    LINEARS,
    chains_of,
    clamped,
    network,
    patched,
    saved,
)
from tests.support.judge import assert_same_step
from tests.support.step import warned
from tests.support.toys import WIDTH, rows


def scaled(net: Any, y: Tensor, x: Tensor) -> None:
    y.mul_(2.0)


def summed(net: Any, y: Tensor, x: Tensor) -> None:
    y += x[..., :HIDDEN]


def set_in_part(net: Any, y: Tensor, x: Tensor) -> None:
    y[1:] += 1.0


def written_by_a_view(net: Any, y: Tensor, x: Tensor) -> None:
    y.view(-1, HIDDEN)[1:].mul_(0.5)


@pytest.mark.parametrize("write", [scaled, summed, set_in_part, written_by_a_view])
def test_a_written_value_is_saved_and_not_what_made_it(write: Any) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        y = net.act(x)
        write(net, y, x)
        result: Tensor = net.down(y)
        return result

    model = network(clamped, body)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    assert saved(model) == LINEARS + 2 * FULL + FULL  # gate and up, and what was written
    assert saved(twin) - saved(model) >= 2 * FULL
    assert_same_step(model, twin, rows())


def test_a_value_that_is_written_before_the_chain_reads_it_does_not_wait() -> None:
    def formula(net: Any, x: Tensor) -> Tensor:
        y = x[..., :HIDDEN].abs() + 1.0
        y.mul_(0.5)
        return torch.exp(-y) * torch.cos(y)

    model = network(formula)
    twin = copy.deepcopy(model)
    with warned():
        patched(model)
    assert chains_of(model) == []
    assert_same_step(model, twin, rows())


def test_a_chain_waits_beside_one_that_cannot() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        gate, up = x[..., ::2], x[..., 1::2]
        hooked = torch.sin(up) * torch.cos(up)
        hooked.register_hook(lambda gradient: 3.0 * gradient)
        result: Tensor = net.down(torch.exp(-gate.abs()) * torch.tanh(gate)) + net.other(hooked)
        return result

    model = network(clamped, body)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1"]
    assert saved(twin) - saved(model) == 3 * FULL  # of exp, tanh and their product
    assert_same_step(model, twin, rows())


class Corrected(nn.Module):
    """As Gemma 3n's alternating updates: a difference of residual streams, repeated, times coefficients,
    plus the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.coefficients = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = x + self.inner(self.norm(x))
        factors = self.coefficients(self.behind(made)).movedim(-1, 0).unsqueeze(-1)
        corrected = (made - x).repeat(4, *(1,) * x.dim()) * factors
        corrected += x
        result: Tensor = self.last(corrected.sum(0))
        return result


def test_what_a_patched_norm_saves_no_longer_is_no_source() -> None:
    """Of a repeated difference the difference is saved: of its terms, the norms alone saved one each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Corrected())
    twin = copy.deepcopy(model)
    x = rows()
    patch_model(model, "exact", example_inputs=(x,))
    assert chains_of(model) == ["1"]
    with saved_bytes(model) as counted:
        model(x)
    # inputs of three Linears, two norms' outputs with a number, the difference, and four coefficients
    assert counted.activations == len(x) * 4 * (5 * WIDTH + 2 + 4)
    assert_same_step(model, twin, x)
