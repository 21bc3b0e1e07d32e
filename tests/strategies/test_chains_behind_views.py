"""A product that a matmul reads behind views is computed again for it, and what enters is saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_patch import patch_model, patch_report
from tests.support.chained import (
    CHAINS,
    FULL,
    HIDDEN,
    chains_of,
    half,
    network,
    patched,
    saved,
)  # fmt: skip
from tests.support.judge import assert_same_step
from tests.support.step import AUTOCAST, BF16, cast
from tests.support.toys import rows


def weighed(net: Any, x: Tensor) -> Tensor:
    """Heads that are multiplied with a number each, as those of an attention with sinks."""
    heads = half(net, x).view(len(x), 4, -1).transpose(0, 1).softmax(-1).contiguous()
    made = heads * x[:, :4].t().contiguous().unsqueeze(-1)
    return made.transpose(0, 1).contiguous().reshape(len(x), HIDDEN).contiguous()


@pytest.mark.parametrize("mode", [None, BF16, AUTOCAST], ids=["float32", "bf16", "autocast"])
def test_a_product_behind_views_is_not_saved_for_a_linear(mode: Any) -> None:
    model = network(weighed)
    model = model if mode is None else cast(model, mode.weights)
    twin, x = copy.deepcopy(model), rows().to(next(model.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, CHAINS, example_inputs=(x,))
    assert chains_of(model) == ["1.act"]
    assert_same_step(model, twin, x, *([] if mode is None else [mode]))
    if mode is None:
        assert saved(twin) - saved(model) == FULL
        assert patch_report(model).saved_after == saved(model)


@pytest.mark.parametrize("view", ["transpose", "permute", "unsqueeze", "view", "write", "hook"])
def test_any_use_of_a_product_behind_views_is_right(view: str) -> None:
    """Planned on a forward whose Linear reads it, and run on others."""

    def used(net: Any, x: Tensor) -> Tensor:
        made = half(net, x).softmax(-1) * x[:, :1]
        if view == "transpose":
            return made.t().cumsum(0).t() * made.t().t()
        if view == "permute":
            return (made.permute(1, 0) * made.t().exp()).t()
        if view == "unsqueeze":
            return made.unsqueeze(1).squeeze(1) + made.square()
        moved = made.view(-1, 2, HIDDEN).reshape(len(x), HIDDEN)
        if view == "write":
            moved.mul_(2.0)
        if view == "hook":
            moved.register_hook(lambda gradient: 3.0 * gradient)
        return moved

    def planned_as(net: Any, x: Tensor) -> Tensor:
        return (half(net, x).softmax(-1) * x[:, :1]).view(-1, 2, HIDDEN).reshape(len(x), HIDDEN)

    model = network(planned_as)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    model[1].act.formula = twin[1].act.formula = used
    if view == "write":  # which the product, held by the forward, would not see
        with pytest.raises(RuntimeError, match="share its memory"):
            model(rows())
        return
    assert_same_step(model, twin, rows())


class Routed(torch.nn.Module):
    """Each expert gets all rows, multiplied with its scores, as Llama 4's do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weights = (
            torch.nn.Linear(16, 2),
            torch.nn.Parameter(torch.randn(2, 16, 8) / 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid().t()
        made = x.repeat(2, 1) * scores.reshape(-1, 1)
        return torch.bmm(made.view(2, -1, 16), self.weights).sum(0)


def test_a_product_behind_a_view_is_not_saved_for_experts() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), Routed())
    twin = copy.deepcopy(model)
    patched(model)
    assert saved(twin) - saved(model) == 2 * len(rows()) * 16 * 4
    assert_same_step(model, twin, rows())


def test_what_keeps_no_gradient_is_called_otherwise() -> None:
    """A rotary embedding multiplies with constants, and need not wait with a product of a gate."""
    table = torch.randn(len(rows()), 1)

    def rotated(net: Any, x: Tensor) -> Tensor:
        return (weighed(net, x * table).cumsum(-1) * table) * x[:, 4:5]

    model = network(rotated)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    assert saved(twin) - saved(model) == FULL
    assert_same_step(model, twin, rows())
