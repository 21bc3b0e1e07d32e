"""Norms whose gamma and beta are not called weight and bias."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import PatchReport, patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.judge import assert_same_function, assert_same_parameters, assert_same_step
from tests.support.step import AUTOCAST, BF16, FP32, Mode, cast
from tests.support.toys import WIDTH, rows


class Layer(nn.Module):
    """As a course writes it; beta comes first in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(variance + self.eps) + self.shift


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if x.dtype == torch.bfloat16 else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.gamma


NORMS = {"layer": Layer, "rms": RootMeanSquare}


def network(norm: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, 3)
    )


def patched(model: Any, preset: Any = "exact") -> PatchReport:
    return patch_report(patch_model(model, preset, example_inputs=(rows(),)))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_it_is_shared_under_its_own_names(norm: Any, mode: Mode) -> None:
    model = cast(network(norm), mode.weights)
    twin = copy.deepcopy(model)
    report = patch_report(patch_model(model, "exact", example_inputs=(rows().to(mode.weights),)))
    assert [site.strategy for site in report.sites] == ["share", "share"]
    statistics = 2 * len(rows()) * (4 - 2)  # ours are in float32, and those of this code in bf16
    assert report.saved_after <= report.floor + (statistics if mode is BF16 else 0)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_same_step(model, twin, rows(), mode)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_life_with_own_names(norm: Any) -> None:
    model = network(norm).double()
    twin, x = copy.deepcopy(model), rows().double()
    report = patch_report(patch_model(model, "exact", example_inputs=(x,)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_function(other, twin, x)
    for name, parameter in model.named_parameters():
        if name in ("1.scale", "1.gamma"):
            with torch.no_grad():
                parameter[0], twin.get_parameter(name)[0] = 0.0, 0.0
    assert_same_function(model, twin, x)  # z is saved where gamma is 0
    model.load_state_dict(twin.state_dict())
    frozen = {name for name, _ in model.named_parameters() if name.startswith("3")}
    for net in (model, twin):
        for name in frozen:
            net.get_parameter(name).requires_grad_(False)
    assert_same_function(model, twin, x)
    unpatch_model(model)
    assert type(model[1]) is norm
    assert_same_parameters(model, twin)
    with saved_bytes(model) as saved:
        model(x)
    assert saved.activations <= report.saved_before


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_it_is_not_folded(norm: Any) -> None:
    model = network(norm)
    twin = copy.deepcopy(model)
    report = patched(model, "paper")
    assert not report.fold_steps and [site.strategy for site in report.sites] == ["share", "share"]
    assert_same_parameters(model, twin)
    assert_same_step(model, twin, rows())


def test_two_vectors_that_are_no_gamma_and_beta() -> None:
    class Squeezed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = network(Squeezed)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patched(model)
    assert_same_step(model, twin, rows())
