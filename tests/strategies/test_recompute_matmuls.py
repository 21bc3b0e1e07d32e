"""A matmul of a matrix, which no Linear calls, saves of an activation what a Linear does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from tests.support.judge import assert_same_step
from tests.support.step import AUTOCAST, FP32, MODES, Mode, cast, step, twin_of


class ByMatmul(nn.Module):
    """An MLP whose second matmul is no Linear's: Falcon's and DBRX's are written so."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU()
        self.down = nn.Linear(48, 16, bias=False)
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(self.act(self.up(self.norm(x))), self.down.weight.t())


@pytest.mark.parametrize(
    "multiply",
    [torch.matmul, lambda x, weight: x @ weight, Tensor.matmul],
    ids=["torch", "@", "method"],
)
@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["fp32", "autocast"])
def test_a_matmul_of_a_matrix_is_a_linear(multiply: Any, mode: Mode) -> None:
    torch.manual_seed(0)
    model = ByMatmul(multiply)
    twin, x = copy.deepcopy(model), torch.randn(2, 5, 16)
    patch_model(model, "exact", example_inputs=(x,))
    report = patch_report(model)
    assert report.above_floor == pytest.approx(1.0, abs=0.02)
    assert [site.strategy for site in report.sites] == ["share", "recompute"]
    assert_same_step(model, twin, x, mode)
    model.down.requires_grad_(False)
    twin.down.requires_grad_(False)
    assert_same_step(model, twin, x, mode)


def test_a_matmul_of_batches_gets_the_values() -> None:
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.expand(2, 48, 16)

    torch.manual_seed(0)
    model = ByMatmul(multiply)
    twin, x = copy.deepcopy(model), torch.randn(2, 5, 16)
    patch_model(model, "exact", example_inputs=(x,))
    assert_same_step(model, twin, x)


class GatedHeads(nn.Module):
    """Attention whose heads have gates, and become one before the Linear behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.gate, self.out = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.act, self.strided = nn.Sigmoid(), False

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], 4, 8)
        values = self.values(x).view(heads)
        if self.strided:  # as attention gives them
            values = values.transpose(1, 2).contiguous().transpose(1, 2)
        y = values * self.act(self.gate(x).view(heads))
        return self.out(y.reshape(*x.shape[:2], 32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strided", [False, True])
def test_gated_heads_that_become_one_save_no_product(strided: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = cast(GatedHeads(), MODES[mode].weights)
    x = {"x": torch.randn(2, 5, 32, dtype=MODES[mode].weights).requires_grad_()}
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
    model.strided = stock.strided = strided  # a view would be a copy
    assert_same_step(model, twin_of(stock, model), x, mode=MODES[mode])
    found, expected = (step(one, x, MODES[mode], count=True).saved for one in (model, stock))
    one = 2 * 5 * 32 * (4 if mode == "fp32" else 2)
    assert expected - found == (0 if strided else one)
    assert strided or patch_report(model).saved_after == found
