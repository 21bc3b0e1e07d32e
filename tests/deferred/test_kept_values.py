"""Whoever keeps a deferred tensor beyond its backward, as a hook may, reads the values of its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from lowmem_patch.nn.deferred import Unstored
from tests.support.judge import assert_close

CHANNELS = 8


class OwnNorm(nn.Module):
    """A norm that the package does not know, of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.randn(1, CHANNELS, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.w * torch.tanh(x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-3)) + self.b
        )


class Scaled(nn.Module):
    """A gated image with a scale that trains; its product is one more step that somebody may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(CHANNELS, 1, 1)), nn.Identity()
        self.gate = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class Viewed(nn.Module):
    """A chain that reads its parameter by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.w.view(1, -1, 1, 1) + 1


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.SiLU())


def normed_in_place() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True))


MIDDLES: list[Callable[[], nn.Module]] = [OwnNorm, Scaled, Viewed, normed, normed_in_place]


def pair(middle: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), middle(), nn.Conv2d(CHANNELS, 4, 1)).double()
    model = copy.deepcopy(twin)
    patch_model(model, "exact", example_inputs=(images(),))
    return model, twin


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)


def keep_outputs(model: nn.Module) -> dict[str, Tensor]:
    """What the modules in the middle return in the next forward."""
    kept: dict[str, Tensor] = {}
    for name, module in model[1].named_modules():

        def note(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            kept[name] = output

        module.register_forward_hook(note)
    return kept


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["whole", "again", "reentrant"])
@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("middle", MIDDLES)
def test_outputs_that_a_hook_keeps_outlive_a_step(
    middle: Any, settings: dict[str, bool], reentrant: bool | None
) -> None:
    """Those of a checkpointed block are of its second run, through which no backward may go."""
    values = []
    for model in pair(middle):
        kept = keep_outputs(model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, **settings)
        x = images().requires_grad_()
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        optimizer.step()
        for _ in range(3):  # each of which would let the values go
            read = {name: (output * 1).detach() for name, output in kept.items()}
        values.append(read)
    found, expected = values
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert_close(found[name], one, name)


@pytest.mark.parametrize("middle", MIDDLES)
def test_outputs_that_nobody_keeps_are_not_made_again(middle: Any, monkeypatch: Any) -> None:
    """Nor those that autograd holds for a second backward."""
    model, _ = pair(middle)
    read = Unstored.read
    held: list[bool] = []

    def noted(h: Unstored) -> Tensor:
        values = read(h)
        held.append(h._exposed)
        return values

    monkeypatch.setattr(Unstored, "read", noted)
    for retain in (False, True):
        loss = model(images()).square().sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
    assert held and not any(held)


def test_a_chain_whose_sources_were_frozen_since_gives_no_gradient() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.m = (nn.Parameter(torch.randn(4, n, 3, 3)) for n in (8, 1))
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.conv2d(self.conv(x), torch.tanh(self.w) * self.m)

    torch.manual_seed(0)
    model = nn.Sequential(Product()).double()
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=(images(),))
    for one in (model, twin):
        loss = one(images()).square().sum()
        one[0].w.requires_grad_(False)
        one[0].m.requires_grad_(False)
        loss.backward()
    assert model[0].w.grad is None
    assert_close(model[0].conv.weight.grad, twin[0].conv.weight.grad, "conv")


def test_a_gated_product_has_the_strides_of_its_memory() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, CHANNELS, 1), nn.Conv2d(3, CHANNELS, 1)
            self.out = nn.Linear(CHANNELS, 4)

        def forward(self, x: Tensor) -> Tensor:
            left, right = (one(x).permute(0, 2, 3, 1) for one in (self.a, self.b))
            self.product = torch.sigmoid(left) * right
            y: Tensor = self.out(self.product)
            return y

    model = nn.Sequential(Gated()).double()
    patch_model(model, "exact", example_inputs=(images(),))
    model(images())
    product: Any = model[0].product
    assert isinstance(product, Unstored)
    assert torch.equal(product.as_strided(product.shape, product.stride()), product.detach())
