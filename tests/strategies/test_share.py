"""A patched model's weights are the user's: `auto` and `exact` change none of them."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.nn.norms import MSNorm
from tests.support.configs import AUTO_WITHOUT_CODES, FOLD
from tests.support.judge import (
    assert_close,
    assert_same_function,
    assert_same_parameters,
    assert_same_weights,
)
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


class _Parts(_Block):
    """Calls its parts by themselves, of which the norm was told nothing when the forward began."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


@pytest.mark.parametrize("make_block", [_Block, _Parts])
@pytest.mark.parametrize("written", ["out.weight", "norm.weight", "norm.bias"])
def test_weight_written_between_forward_and_backward_is_no_silent_error(
    written: str, make_block: type[_Block]
) -> None:
    """An error as unpatched, or the gradients of the weights as they were."""
    model, x = make_block().double(), torch.randn(3, 8, dtype=torch.float64)
    if (
        written == "norm.weight"
    ):  # the norm itself does not save it then, the Linear behind may need it
        model.norm.weight.requires_grad_(False)
        model.enter.requires_grad_(False)
    stock = copy.deepcopy(model)
    stock(x).square().sum().backward()
    _Block.__call__(patch_model(model, "exact", example_inputs={"x": x}), x)
    loss = model(x).square().sum()
    with torch.no_grad():
        model.get_parameter(written).mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        assert re.search("modified by an inplace operation|lowmem_patch: .* its weight", str(error))
        return
    assert written != "out.weight"
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            assert_close(model.get_parameter(name).grad, parameter.grad, name)


def _norms_that_save(model: nn.Module, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """``z`` and ``output``: what the norms save in one step through ``model``."""
    found = set()
    was = MSNorm._saves_z

    def seen(self: MSNorm, *args: Any) -> bool:
        saves_z = was(self, *args)
        found.add("z" if saves_z else "output")
        return saves_z

    monkeypatch.setattr(MSNorm, "_saves_z", seen)
    model.zero_grad()
    model(inputs).sum().backward()
    monkeypatch.setattr(MSNorm, "_saves_z", was)
    return found


def test_norm_saves_its_output_where_the_forward_looked_at_gamma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = _Block(), torch.randn(3, 8)
    patch_model(model, "exact", example_inputs={"x": x})
    assert _norms_that_save(model, x, monkeypatch) == {"output"}
    assert _norms_that_save(copy.deepcopy(model), x, monkeypatch) == {"output"}
    assert _norms_that_save(pickle.loads(pickle.dumps(model)), x, monkeypatch) == {"output"}
    with torch.no_grad():
        model.norm.weight[3] = 0
    assert _norms_that_save(model, x, monkeypatch) == {"z"}
    model.norm.weight.data.fill_(1)  # without a trace
    assert _norms_that_save(model, x, monkeypatch) == {"output"}
    model.norm.weight.data[3] = 0
    assert _norms_that_save(model, x, monkeypatch) == {"z"}
    # a part that is called by itself was told nothing
    model.norm.weight.data.fill_(1)
    model(x)
    assert _norms_that_save(model.norm, x, monkeypatch) == {"z"}


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.reentrant = _Block(), False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_norm_saves_in_backward_as_in_forward(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _Checkpointed().double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs={"x": x})
    model.reentrant = stock.reentrant = reentrant
    # a reentrant checkpoint saves nothing in the first run, and gamma may be another one in the second
    wanted = "z" if reentrant else "output"
    assert _norms_that_save(model, x, monkeypatch) == {wanted}
    stock(x).sum().backward()
    for name, parameter in stock.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad, name)


@pytest.mark.slow
def test_a_process_that_has_only_torch_can_patch() -> None:
    code = """
import torch, lowmem_patch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
lowmem_patch.patch_model(model, example_inputs=(torch.randn(2, 8),))
print(sum(type(m).__name__ == 'StockMSLayerNorm' for m in model))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr


def test_a_probe_warns_of_nothing() -> None:
    """torch warns where the dtypes of an RMSNorm's weight and input differ, which a probe tries."""
    model, always = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)), torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else the first time in a process alone
    try:
        with warnings.catch_warnings(record=True, action="always") as said:
            patch_model(model, example_inputs=(torch.randn(4, 16),))
    finally:
        torch.set_warn_always(always)
    assert patch_report(model).sites[0].strategy == "share"
    assert not said, [str(warning.message) for warning in said]


def test_the_reason_says_in_plain_words_what_is_saved() -> None:
    def reason(norm: nn.Module) -> str:
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))
        return patch_report(patch_model(model, example_inputs=(torch.randn(2, 8),))).sites[0].reason

    plain = "the norm and its Linears save one tensor: the norm's output"
    assert reason(nn.LayerNorm(8, elementwise_affine=False)) == plain
    affine = ", or its normalised input z if a gamma is so near 0 that the output does not give z"
    assert reason(nn.LayerNorm(8)) == plain + affine


@pytest.mark.parametrize("trains", [False, True])
def test_norm_in_front_of_a_frozen_linear_says_that_it_saves_no_less(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[2].requires_grad_(trains)
    site = plan_patch(model, "exact", example_inputs=(torch.randn(2, 8),)).sites[0]
    assert site.strategy == "share"
    assert ("it saves nothing here, since the Linears" in site.reason) != trains


class _Writes(nn.Module):
    """The output of a norm is written in place."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.named = nn.LayerNorm(16), nn.Linear(16, 16), named

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.linear(torch.relu_(input=y) if self.named else torch.relu_(y))


@pytest.mark.parametrize("named", [False, True])
def test_a_write_is_seen_however_its_argument_is_given(named: bool) -> None:
    report = plan_patch(_Writes(named), example_inputs=(torch.randn(4, 16),))
    assert [site.reason for site in report.sites] == ["its output is written in place by relu_"]
