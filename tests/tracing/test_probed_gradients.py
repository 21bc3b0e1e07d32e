"""What computes the values of a norm or of an activation, and other gradients, is left alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from lowmem_patch.tracing.probes import match_activation
from tests.support.judge import assert_same_step


def strategies_of(model: nn.Module) -> set[str]:
    return {site.strategy for site in patch_report(model).sites}


class _Called(nn.Module):
    """A function as an activation."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return F.relu(x)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return dy


def _without_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.silu(x)


class _Guided(torch.autograd.Function):
    """Drops negative gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return dy.clamp(min=0) * gate * (1 + x * (1 - gate))


class _GuidedInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Guided.apply(x) if self.training else F.silu(x)
        return y


def test_activation_of_other_gradient_in_training_is_none() -> None:
    assert match_activation(_GuidedInTraining()) is None


@pytest.mark.parametrize(
    "function",
    [
        _Guided.apply,
        lambda x: x * torch.sigmoid(x.detach()),
        lambda x: x.detach() * torch.sigmoid(x),
        _StraightThrough.apply,
        _without_graph,
    ],
)
def test_activation_of_other_gradient_is_none(function: Callable[[Tensor], Tensor]) -> None:
    assert match_activation(_Called(function)) is None


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: x.mul_(torch.sigmoid(x)), "silu"),  # writes into its input
        # its own gradient is not finite above 88
        (lambda x: x * (1 - 1 / (1 + x.exp())), "silu"),
        (lambda x: x.clamp(min=0), "relu"),  # 1 at 0, where torch's relu has 0
    ],
)
def test_activation_written_out_is_found(function: Callable[[Tensor], Tensor], kind: str) -> None:
    assert match_activation(_Called(function)) == kind


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x) * self.weight


class _NormOfDetachedScale(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x).detach() * self.weight


class _NormOfDetachedWeight(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x) * self.weight.detach()


class _NormOfClippedInput(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100))


class _NormDetachedInTraining(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        return x * (scale.detach() if self.training else scale) * self.weight


class _NormOfClippedGradients(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-10, 10))
        return y


class _NormOfPositiveWeight(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x) * self.weight.abs()


class _Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize(
    "norm",
    [
        _NormOfDetachedScale, _NormOfDetachedWeight, _NormOfClippedInput, _NormDetachedInTraining,
        _NormOfClippedGradients,
    ],
)  # fmt: skip
def test_norm_of_other_gradient_is_not_shared(norm: type[_Norm]) -> None:
    torch.manual_seed(0)
    model, x = _Block(norm()), torch.randn(2, 4, 16) * 200
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings(action="ignore"):
        patch_model(model, "auto", example_inputs=(x,))
    assert type(model.norm) is norm and strategies_of(model) <= {"keep", "recompute"}
    model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)


class _NormOfClippedRows(nn.Module):
    """Rows of more than 100 channels, one of which is large, are clipped."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).clamp(-10, 10)


class _NormOverTwoDimensions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean((1, 3), keepdim=True)
        return centred * torch.rsqrt(centred.square().mean((1, 3), keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    "norm", [_NormOfPositiveWeight, _NormOfClippedRows, _NormOverTwoDimensions]
)
def test_norm_of_other_values_elsewhere_is_not_shared(norm: type[nn.Module]) -> None:
    size = 16 if norm is _NormOfPositiveWeight else 256
    model = nn.Sequential(norm(), nn.Linear(size, size))
    with warnings.catch_warnings(action="ignore"):
        patch_model(model, "auto", example_inputs=(torch.randn(2, 3, 4, size),))
    assert type(model[0]) is norm and strategies_of(model) <= {"keep", "recompute"}


def test_norm_written_out_is_patched() -> None:
    model = _Block(_Norm())
    patch_model(model, "auto", example_inputs=(torch.randn(2, 4, 16),))
    assert type(model.norm) is not _Norm


@pytest.mark.parametrize("size", [2, 3, 16, 16384])
def test_norms_of_any_size_are_patched(size: int) -> None:
    norms = nn.LayerNorm(size, elementwise_affine=False), nn.LayerNorm(size), nn.RMSNorm(size)
    for norm in norms:
        model = nn.Sequential(norm, nn.Linear(size, 2))
        patch_model(model, "auto", example_inputs=(torch.randn(2, 3, 2, size),))
        assert type(model[0]) is not type(norm)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_norms_of_torch_are_known_at_any_width(width: int) -> None:
    """Of one channel, gamma's gradient in float32 is nothing but rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 4))
    twin = copy.deepcopy(net)
    x = torch.randn(5, 4)
    report = patch_report(patch_model(net, "exact", example_inputs=x))
    assert [site.strategy for site in report.sites] == ["share"]
    assert_same_step(net, twin, x)
