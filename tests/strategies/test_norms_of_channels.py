"""LayerNorm and RMSNorm over the channels of images, in front of a convolution (ConvNeXt, SAM)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from tests.support.judge import assert_same_parameters, assert_same_step
from tests.support.models import randomise
from tests.support.step import MODES, cast, step

CHANNELS, SIZE = 8, 6


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RMSNorm2d(nn.Module):
    """No stock norm, and no bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)
        return F.rms_norm(rows, rows.shape[-1:], self.scale, 1e-6).permute(0, 3, 1, 2)


class WrittenNorm2d(LayerNorm2d):
    """Its output lies with the channels first, as its input does."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        z = (x - mean) * torch.rsqrt(variance + self.eps)
        return z * self.weight[:, None, None] + self.bias[:, None, None]


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": LayerNorm2d, "rms": RMSNorm2d}


class Stage(nn.Module):
    """A norm between two convolutions, and another whose rows a Linear reads."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 1)
        self.norm, self.conv = norm(CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.last, self.out = norm(CHANNELS), nn.Linear(CHANNELS, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(self.stem(x)))
        read: Tensor = self.out(self.last(x).permute(0, 2, 3, 1))
        return read


def images(columns: int = SIZE + 1) -> Tensor:
    return torch.randn(2, 3, SIZE, columns)


def patched(model: nn.Module, x: Any, preset: str = "exact") -> tuple[Any, Any]:
    """The model and a copy of it from before the patch."""
    stock = copy.deepcopy(randomise(model).train())
    return patch_model(model, preset, example_inputs=x), stock


def _patched_sites(model: nn.Module) -> set[str]:
    return {site.name for site in patch_report(model).patched}


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_and_the_convolution_save_one_tensor(name: str) -> None:
    x = images()
    model, stock = patched(Stage(NORMS[name]), x)
    before, after = (step(one, x, count=True).saved for one in (stock, model))
    map_of_channels = x.nbytes * CHANNELS // 3
    statistics = x.nbytes // 3  # one number a pixel
    assert after == patch_report(model).saved_after == x.nbytes + 2 * (map_of_channels + statistics)
    assert before - after >= 2 * map_of_channels


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NORMS)
def test_a_step_is_as_accurate_as_the_unpatched_one(name: str, mode: str) -> None:
    x = images().to(MODES[mode].weights)
    model = cast(randomise(Stage(NORMS[name])), MODES[mode].weights).train()
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
    assert {"norm", "last"} <= _patched_sites(model)
    assert_same_step(model, stock, x, MODES[mode])


@pytest.mark.parametrize("columns", [CHANNELS, SIZE])
def test_as_many_columns_as_channels_hide_nothing(columns: int) -> None:
    x = images(columns)
    model, stock = patched(Stage(LayerNorm2d), x)
    assert "norm" in _patched_sites(model)
    assert_same_step(model, stock, x)


def test_a_channel_of_gamma_zero() -> None:
    x = images()
    model, stock = patched(Stage(LayerNorm2d), x)
    for one in (model, stock):
        with torch.no_grad():
            one.norm.weight[2] = one.last.weight[3] = 0.0
    assert_same_step(model, stock, x)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_output_lies_as_the_unpatched_one(channels_last: bool) -> None:
    model, stock = patched(Stage(LayerNorm2d), images())
    x = torch.randn(2, CHANNELS, SIZE, SIZE)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        model, stock = (one.to(memory_format=torch.channels_last) for one in (model, stock))
    assert model.norm(x).stride() == stock.norm(x).stride()
    assert_same_step(model, stock, images().contiguous(memory_format=torch.channels_last))


def test_a_norm_whose_output_lies_otherwise_is_not_replaced() -> None:
    x = images()
    model, stock = patched(Stage(WrittenNorm2d), x)
    assert type(model.norm) is WrittenNorm2d
    plan = plan_patch(stock, {"norms": "share", "activations": "keep"}, example_inputs=x)
    (site,) = (site for site in plan.sites if site.name == "norm")
    assert "do not lie last" in site.reason
    assert_same_step(model, stock, x)


def test_classes_parameters_and_undo() -> None:
    x = images()
    model, stock = patched(Stage(LayerNorm2d), x)
    assert isinstance(model.norm, nn.LayerNorm)
    assert_same_parameters(model, stock)
    assert type(unpatch_model(model).norm) is LayerNorm2d
    assert_same_step(model, stock, x)


def _double_unseen(module: nn.Module, args: Any, output: Tensor) -> None:
    output.data.mul_(2)


def test_a_write_of_which_torch_is_not_told() -> None:
    x = images()
    model, stock = patched(Stage(LayerNorm2d), x)
    for one in (model, stock):
        one.norm.register_forward_hook(_double_unseen)
    assert_same_step(model, stock, x)


def test_paper_folds_no_norm_of_channels() -> None:
    x = images()
    model, stock = patched(Stage(LayerNorm2d), x, "paper")
    assert {site.strategy for site in patch_report(model).patched} == {"share"}
    assert_same_parameters(model, stock)
    assert_same_step(model, stock, x)


def test_linears_that_read_rows_as_they_lie_need_no_z() -> None:
    model, _ = patched(Stage(LayerNorm2d), images())
    assert not model.last.use.output_moved


class Rolled(Stage):
    """Rows of the norm's output are moved in front of the Linear."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.last(self.conv(self.norm(self.stem(x)))).permute(0, 2, 3, 1)
        read: Tensor = self.out(rows.transpose(1, 2).contiguous())
        return read


class Activated(Stage):
    """The norm reads an activation that is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.last(F.silu(self.conv(self.norm(self.stem(x))))).permute(0, 2, 3, 1)
        read: Tensor = self.out(rows)
        return read


@pytest.mark.parametrize("kind", [Rolled, Activated])
def test_what_stands_beside_the_norm(kind: type[Stage]) -> None:
    x = images()
    model, stock = patched(kind(LayerNorm2d), x)
    assert "norm" in _patched_sites(model)
    assert_same_step(model, stock, x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", NORMS)
def test_compiled_and_checkpointed(name: str) -> None:
    x = images()
    model, stock = patched(Stage(NORMS[name]), x)
    assert_same_step(torch.compile(model, backend="aot_eager", fullgraph=True), stock, x)

    class Again(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    assert_same_step(Again(model), Again(stock), x)


def _convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    return transformers.ConvNextForImageClassification(config)


def _timm(name: str) -> nn.Module:
    made: nn.Module = timm.create_model(name, dims=(8, 16, 16, 16), depths=(1, 1, 1, 1))
    return made


# and the most times the floor
MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "transformers": (_convnext, 1.02),
    "timm": (lambda: _timm("convnext_tiny"), 1.02),
    # with convolutions in the place of Linears, whose outputs LayerScale saves
    "timm, convolutions": (lambda: _timm("convnext_atto"), 1.1),
}


@pytest.mark.parametrize("mode", ["fp32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_models_save_little_more_than_their_floor(name: str, mode: str) -> None:
    x = torch.randn(2, 3, 32, 32)
    make, most = MODELS[name]
    model = randomise(make()).train()
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
        assert 1.0 <= patch_report(model).above_floor <= most
    assert_same_step(model, stock, x, MODES[mode])
