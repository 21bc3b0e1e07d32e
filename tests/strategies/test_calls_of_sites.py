"""A patched site is called as the original: by place, by name, or beside arguments that are None."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is not None:
            hidden = hidden * F.silu(gate)
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class _Activation(nn.Module):
    def forward(self, hidden: Tensor, scale: float | None = None) -> Tensor:
        return F.gelu(hidden if scale is None else hidden * scale)


class _NormWithout(_Norm):
    """None is another thing than its default."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None, scale: Any = True) -> Tensor:
        y = super().forward(hidden)
        return y if scale else 2 * y


class _Net(nn.Module):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), _Norm()
        self.second, self.act, self.last = nn.Linear(16, 16), _Activation(), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.1)
        self.args, self.named = args, named

    def call(self, site: nn.Module, hidden: Tensor) -> Any:
        if "hidden" in self.named:
            return site(hidden=hidden)
        return site(hidden, *self.args, **self.named.get(type(site).__name__, {}))

    def forward(self, x: Tensor) -> Any:
        hidden = self.drop(input=self.call(self.norm, self.first(x)))
        return self.last(self.call(self.act, self.second(hidden)))


@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
@pytest.mark.parametrize(
    "net", [lambda: _Net(None), lambda: _Net(hidden=True), lambda: _Net()], ids=["none", "name", "place"]
)  # fmt: skip
def test_site_takes_its_tensor_as_the_original_did(net: Any, preset: str) -> None:
    torch.manual_seed(0)
    model, x = net().double(), torch.randn(3, 5, 16, dtype=torch.float64)
    model.drop.p = 0.0
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    patch_model(model, preset, example_inputs=(x,))
    assert type(model.norm) is not _Norm and type(model.act) is not _Activation
    if preset != "paper":
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(found, wanted)
    assert model(x).shape == (3, 5, 4)


def test_activation_called_with_a_number_is_left_alone() -> None:
    model, x = _Net(), torch.randn(3, 5, 16)
    model.named = {"_Activation": {"scale": 2.0}}
    patch_model(model, "exact", example_inputs=(x,))
    assert type(model.norm) is not _Norm and type(model.act) is _Activation


def test_path_that_was_not_traced_is_an_error() -> None:
    model, x = _Net(), torch.randn(3, 5, 16)
    patch_model(model, "exact", example_inputs=(x,))
    with pytest.raises(TypeError, match=r"called with 2 arguments: call patch_model again"):
        model.norm(x, gate=x)
    with pytest.raises(TypeError, match=r"called with 2 arguments: call patch_model again"):
        model.act(x, 2.0)


def test_none_in_the_place_of_another_default_is_no_call_of_a_norm() -> None:
    model, x = _Net(), torch.randn(3, 5, 16)
    model.norm = _NormWithout()
    model.named = {"_NormWithout": {"scale": None}}
    model.drop.p = 0.0
    wanted = model(x)
    patch_model(model, "exact", example_inputs=(x,))
    assert type(model.norm) is _NormWithout
    torch.testing.assert_close(model(x), wanted)
