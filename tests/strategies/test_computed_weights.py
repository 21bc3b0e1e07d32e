"""Weights that a forward computes: under autocast their cast is saved, as torch's own op saves it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured

from lowmem_patch import patch_model, saved_bytes
from tests.support.judge import assert_accurate
from tests.support.step import AUTOCAST, FP32, Mode, step, truth_of

WIDTH, HIDDEN, ROWS, SIDE = 32, 64, 8, 6


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)  # as BiT and NFNet do it
        weight = F.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def linears() -> tuple[nn.Module, Tensor]:
    last = weight_norm(nn.Linear(HIDDEN, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), last), torch.randn(ROWS, WIDTH)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)


class Gated(nn.Module):
    """A frozen Linear of a computed weight behind a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.act = Halved(HIDDEN, WIDTH).requires_grad_(False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return down


def frozen() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated()), torch.randn(ROWS, WIDTH)


def convolutions() -> tuple[nn.Module, Tensor]:
    parts = (
        Standardised(3, WIDTH, 3),
        nn.GroupNorm(4, WIDTH),
        nn.ReLU(),
        Standardised(WIDTH, WIDTH, 3),
    )
    return nn.Sequential(*parts), torch.randn(2, 3, SIDE, SIDE)


@pytest.mark.parametrize("planned", [FP32, AUTOCAST], ids=["planned-without", "planned-under"])
@pytest.mark.parametrize("build", [linears, frozen, convolutions])
def test_no_float32_copy_of_a_computed_weight_is_saved(
    build: Callable[[], tuple[nn.Module, Tensor]], planned: Mode
) -> None:
    torch.manual_seed(0)
    model, x = build()
    with torch.autocast("cpu", torch.bfloat16, enabled=planned is AUTOCAST):
        ours = patch_model(copy.deepcopy(model), "exact", example_inputs=x)
    saved = []
    for one in (ours, model):
        with torch.autocast("cpu", torch.bfloat16), saved_bytes(one) as counted:
            one(x)
        saved.append(counted.activations)
    assert saved[0] < saved[1]
    found, own = (step(one, x, AUTOCAST) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, x), AUTOCAST)


def pruned_head() -> nn.Module:
    """Once it has run, torch does not copy it."""
    torch.manual_seed(0)
    last: nn.Module = l1_unstructured(nn.Linear(WIDTH, 200), "weight", 0.5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), last)


def test_a_pruned_head_saves_the_cast_of_its_weight() -> None:
    model, x = pruned_head(), torch.randn(ROWS, WIDTH)
    ours = patch_model(pruned_head(), "exact", example_inputs=x)
    saved = []
    for one in (ours, model):
        with torch.autocast("cpu", torch.bfloat16):
            with saved_bytes(one) as counted:
                one(x)
            F.cross_entropy(one(x), torch.arange(ROWS)).backward()
        saved.append(counted.activations)
    assert saved[0] <= saved[1]
    for found, own in zip(ours.parameters(), model.parameters(), strict=True):
        assert found.grad is not None and own.grad is not None
        # both round to bfloat16, in another order of sums
        assert (found.grad - own.grad).norm() <= 2 * torch.finfo(
            torch.bfloat16
        ).eps * own.grad.norm()
