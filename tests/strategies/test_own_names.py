"""Norms whose gamma and beta are not called weight and bias."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from lowmem_patch import PatchReport, patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.judge import (
    assert_close,
    assert_same_function,
    assert_same_parameters,
    assert_same_step,
)
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


def assert_nothing_but_chains(report: PatchReport) -> None:
    """No norm takes a module's place; a forward whose elementwise functions wait is the module's own."""
    assert {site.kind for site in report.patched} <= {"chain"}


def test_two_vectors_that_are_no_gamma_and_beta() -> None:
    class Squeezed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = network(Squeezed)
    twin = copy.deepcopy(model)
    assert_nothing_but_chains(patched(model))
    assert_same_step(model, twin, rows())


class Halves(nn.Module):
    """One of both names is torch's own, or both are, the other way round."""

    def __init__(self, gamma: str, beta: str) -> None:
        super().__init__()
        self.called = (gamma, beta)
        self.register_parameter(gamma, nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)))
        self.register_parameter(beta, nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta = (getattr(self, name) for name in self.called)
        return nn.functional.layer_norm(x, (WIDTH,)) * gamma + beta


@pytest.mark.parametrize(
    ("gamma", "beta", "strategy"),
    [
        ("scale", "bias", "share"),
        ("weight", "shift", "share"),
        ("bias", "shift", "keep"),
        ("scale", "weight", "keep"),
        ("trains", "settings", "keep"),
    ],
)
def test_one_name_is_that_of_torch(gamma: str, beta: str, strategy: str) -> None:
    model = network(lambda: Halves(gamma, beta))
    twin = copy.deepcopy(model)
    with warnings.catch_warnings(action="ignore" if strategy == "keep" else "error"):
        report = patched(model)
    assert next(site.strategy for site in report.sites if site.name == "1") == strategy
    assert_same_step(model, twin, rows())
    loaded = pickle.loads(pickle.dumps(model))
    for net in (loaded, twin):
        register_parametrization(net[1], gamma, nn.Softplus())
    assert_same_step(loaded, twin, rows())


class Small(nn.Module):
    """A norm whose eps only tiny rows show, beside an attribute that might be taken for eps."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.dropout = 0.0
        self.constants = (eps,)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.constants[0]) * self.gamma


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * WIDTH**0.5 * self.gamma


TINY = {
    "1e-16": (lambda: Small(1e-16), "keep"),
    "1e-12": (lambda: Small(1e-12), "share"),
    "1e-8": (lambda: Small(1e-8), "share"),
    "normalize": (ByLength, "share"),
}


@pytest.mark.parametrize(("norm", "strategy"), TINY.values(), ids=TINY)
def test_rows_of_zeros_have_the_gradient_of_the_very_eps(norm: Any, strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm(), nn.Linear(WIDTH, 3))
    twin, x = copy.deepcopy(model), rows()
    with warnings.catch_warnings(action="ignore" if strategy == "keep" else "error"):
        report = patched(model)
    shared = [site.strategy for site in report.patched if site.strategy == "share"]
    assert shared == ["share"] * (strategy == "share")
    x[:2] = 0.0
    assert_same_step(model, twin, x)


class Counts(Layer):
    """A norm that also counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


class Doubles(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


@pytest.mark.parametrize("norm", [Counts, Doubles])
def test_a_norm_that_does_more_in_training_is_left_alone(norm: Any) -> None:
    model = network(norm)
    twin = copy.deepcopy(model)
    assert_nothing_but_chains(patched(model))
    assert_same_step(model, twin, rows())
    for net in (model, twin):
        net(rows())
    for buffer, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other)


class RootMeanSquareWithBeta(RootMeanSquare):
    def __init__(self, beta: str) -> None:
        super().__init__()
        self.called = beta
        self.register_parameter(beta, nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        beta: Tensor = getattr(self, self.called)
        return super().forward(x) + beta


@pytest.mark.parametrize("beta", ["beta", "bias"])
def test_beta_of_an_rms_norm_counts_without_gradients(beta: str) -> None:
    model = network(lambda: RootMeanSquareWithBeta(beta)).double()
    twin, x = copy.deepcopy(model), rows().double()
    assert all(site.patched for site in patched_of(model, x).sites)
    assert_same_function(model, twin, x)
    with torch.no_grad():
        assert_close(model(x), twin(x), "output")
        assert_close(model.eval()(x), twin.eval()(x), "output in eval")


def patched_of(model: Any, x: Tensor) -> PatchReport:
    return patch_report(patch_model(model, "exact", example_inputs=(x,)))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(WIDTH), Layer], ids=["stock", "own"])
def test_a_pruned_norm_is_left_alone(norm: Any, trains: bool) -> None:
    model, twin = network(norm), network(norm)
    name = next(iter(dict(model[1].named_parameters())))
    for net in (model, twin):
        net[1].requires_grad_(trains)
        prune.l1_unstructured(net[1], name, 3)
    report = patched(model)
    assert [site.name for site in report.patched if site.kind != "chain"] == ["3"]
    x = rows().double()
    assert_close(model.double()(x), twin.double()(x), "output")
