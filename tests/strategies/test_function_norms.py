"""Norms that a forward calls as functions, squared ReLUs, and norms whose eps is a number of the code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import PatchReport, patch_model, patch_report, saved_bytes
from tests.support.judge import assert_same_function, assert_same_step
from tests.support.step import AUTOCAST, BF16, FP32, Mode, cast
from tests.support.toys import WIDTH, rows

HIDDEN = 4 * WIDTH


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rms_eps(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-3)


def layer(x: Tensor) -> Tensor:
    return F.layer_norm(x, [WIDTH])


def double_layer(x: Tensor) -> Tensor:
    return torch.layer_norm(x, (WIDTH,), None, None, 1e-6)


NORMS = {"rms": rms, "rms_eps": rms_eps, "layer": layer, "torch": double_layer}


class Block(nn.Module):
    def __init__(
        self, norm: Callable[[Tensor], Tensor], square: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm, self.square = norm, square

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.square(F.relu(self.up(self.norm(x)))))
        return x + y


def network(norm: Any = rms, square: Any = torch.square) -> Any:
    torch.manual_seed(0)
    blocks = (Block(norm, square) for _ in range(2))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3))


def patched(model: Any, preset: Any = "exact") -> PatchReport:
    return patch_report(patch_model(model, preset, example_inputs=(rows(),)))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_a_block_of_functions_is_at_its_floor(norm: Any, mode: Mode) -> None:
    model = cast(network(norm), mode.weights)
    twin, x = copy.deepcopy(model), rows().to(mode.weights)
    report = patch_report(patch_model(model, "exact", example_inputs=(x,)))
    assert [site.strategy for site in report.sites] == ["share", "recompute"] * 2
    assert report.above_floor == pytest.approx(1.0, abs=0.02)
    assert_same_step(model, twin, x, mode)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_eps_is_the_functions_in_every_dtype(norm: Any) -> None:
    model = network(norm)
    twin = copy.deepcopy(model).double()
    patched(model)
    # rows so small that eps says what the norm is
    assert_same_function(model.double(), twin, rows() * 1e-4)


@pytest.mark.parametrize("preset", ["paper", {"norms": "fold"}, "compact"], ids=str)
def test_other_presets_share_what_has_no_weight(preset: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    report = patched(model, preset)
    assert [site.strategy for site in report.sites if "norm" in site.kind] == ["share"] * 2
    with torch.no_grad():
        assert torch.allclose(model(rows()), twin(rows()), rtol=1e-5, atol=1e-5)


def test_a_norm_with_weight_is_left_and_named() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(F.layer_norm(x, (WIDTH,), self.weight))

    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Weighted(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
    )
    twin = copy.deepcopy(model)
    report = patched(model)
    (note,) = (note for note in report.notes if "called as functions" in note)
    assert note.endswith("left alone: 1 (F.layer_norm in 1)")
    assert_same_step(model, twin, rows())


def test_a_weighted_norm_beside_one_without_weight_is_named() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(rms(x)) + self.inner(F.rms_norm(x, (WIDTH,), self.weight))

    report = patched(nn.Sequential(nn.Linear(WIDTH, WIDTH), Both(), nn.Linear(WIDTH, 3)))
    assert [site.strategy for site in report.sites] == ["share"]
    (note,) = (note for note in report.notes if "called as functions" in note)
    assert note.endswith("left alone: 1 (F.rms_norm in 1)")


SQUARES = {
    "square": torch.square, "method": Tensor.square, "pow": lambda x: x.pow(2), "operator": lambda x: x**2,
}  # fmt: skip


@pytest.mark.parametrize("square", SQUARES.values(), ids=SQUARES)
def test_a_squared_relu_saves_its_input(square: Any) -> None:
    model = network(square=square)
    twin = copy.deepcopy(model)
    report = patched(model)
    assert report.above_floor == pytest.approx(1.0, abs=0.02)
    assert_same_step(model, twin, rows())


def test_other_powers_and_other_readers_get_the_values() -> None:
    def cubed(x: Tensor) -> Tensor:
        return x**3 + x

    def of_another(x: Tensor) -> Tensor:
        return F.gelu(x) ** 2

    for square in (cubed, of_another, lambda x: x**2 + x, lambda x: x.pow(exponent=2)):
        model = network(square=square)
        twin = copy.deepcopy(model)
        report = patched(model)
        with saved_bytes(model) as saved:
            model(rows())
        assert saved.activations == report.saved_after <= report.saved_before
        assert_same_step(model, twin, rows())


class WrittenOut(nn.Module):
    """As users write it: eps is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_norm_whose_eps_is_a_number_of_the_code() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), WrittenOut(), nn.Linear(WIDTH, 3))
    twin = copy.deepcopy(model).double()
    report = patched(model)
    assert [site.strategy for site in report.sites] == ["share"]
    assert_same_function(model.double(), twin, rows() * 1e-3)


def test_a_module_that_calls_such_a_function_is_one_site() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 3)
    )
    assert [site.name for site in patched(model).sites] == ["1"]


def test_under_transforms_the_function_runs() -> None:
    model = network()
    twin, x = copy.deepcopy(model), rows()
    patched(model)
    ours, theirs = (
        torch.func.grad(lambda y, net=net: net(y).square().sum())(x) for net in (model, twin)
    )
    assert torch.equal(ours, theirs)
