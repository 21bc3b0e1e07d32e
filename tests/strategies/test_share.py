"""A patched model's weights are the user's: `auto` and `exact` change none of them."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, unpatch_model
from tests.support.configs import AUTO_WITHOUT_CODES, FOLD
from tests.support.judge import assert_same_function, assert_same_parameters, assert_same_weights
from tests.support.models import FAMILIES, doubles
from tests.support.step import bytes_of, trained

Make = Callable[[str], Any]
PRESETS = ["auto", "exact"]
NAMES = ["llama", "gemma", "timm-vit", "t5"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_bit_equal_after_the_patch(name: str, preset: str, make: Make) -> None:
    model, inputs = doubles(make, name)
    stock = copy.deepcopy(model)
    places = {n: id(p) for n, p in model.named_parameters()}
    patch_model(model, preset, example_inputs=inputs)
    assert_same_parameters(model, stock)
    assert {n: id(p) for n, p in model.named_parameters()} == places
    assert not patch_report(model).fold_steps
    unpatch_model(model)
    assert_same_parameters(model, stock)


@pytest.mark.parametrize("config", [AUTO_WITHOUT_CODES, "exact"], ids=PRESETS)
@pytest.mark.parametrize("name", ["llama", "timm-vit"])
def test_adamw_follows_the_unpatched_trajectory(name: str, config: Any, make: Make) -> None:
    model, inputs = doubles(make, name)
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    assert bytes_of(model, inputs) < bytes_of(stock, inputs)
    assert_same_weights(trained(model, inputs), trained(stock, inputs))


@pytest.mark.parametrize("name", ["llama", "timm-vit"])
def test_auto_keeps_no_more_bytes_than_folding(name: str, make: Make) -> None:
    inputs = FAMILIES[name].inputs()
    shared = patch_model(make(name), AUTO_WITHOUT_CODES, example_inputs=inputs)
    folded = patch_model(make(name), FOLD, example_inputs=inputs)
    assert patch_report(folded).fold_steps and not patch_report(shared).fold_steps
    assert bytes_of(shared, inputs) == bytes_of(folded, inputs) == patch_report(shared).saved_after


@pytest.mark.parametrize("preset", PRESETS)
def test_state_dict_loads_into_a_stock_model(preset: str, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    config = AUTO_WITHOUT_CODES if preset == "auto" else preset
    trained(patch_model(model, config, example_inputs=inputs), inputs, steps=2)
    stock.load_state_dict(model.state_dict())
    assert_same_function(model, stock, inputs)


@pytest.mark.parametrize("preset", PRESETS)
def test_partial_state_dict_of_a_stock_model_loads(preset: str, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    patch_model(model, AUTO_WITHOUT_CODES if preset == "auto" else preset, example_inputs=inputs)
    with torch.no_grad():
        linears = {n: p * 1.5 for n, p in stock.state_dict().items() if "proj" in n}
    for net in (model, stock):
        net.load_state_dict(linears, strict=False)
        layer = net.model.layers[0]
        layer.load_state_dict({n: p * 0.5 for n, p in layer.state_dict().items()})
        query = net.model.layers[1].self_attn.q_proj
        query.load_state_dict({"weight": query.weight.detach() * 2})
    assert_same_parameters(model, stock)
    assert_same_function(model, stock, inputs)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.enter(x)))
        return out


@pytest.mark.parametrize("written", ["out.weight", "norm.weight", "norm.bias"])
def test_weight_written_between_forward_and_backward_is_an_error(written: str) -> None:
    """As unpatched: the gradients would be those of other weights."""
    model, x = _Block(), torch.randn(3, 8)
    if (
        written == "norm.weight"
    ):  # the norm itself does not save it then, the Linear behind needs it
        model.norm.weight.requires_grad_(False)
        model.enter.requires_grad_(False)
    patch_model(model, "exact", example_inputs={"x": x})
    loss = model(x).square().sum()
    with torch.no_grad():
        model.get_parameter(written).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_process_that_has_only_torch_can_patch() -> None:
    code = """
import torch, lowmem_patch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
lowmem_patch.patch_model(model, example_inputs=(torch.randn(2, 8),))
print(sum(type(m).__name__ == 'StockMSLayerNorm' for m in model))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr
