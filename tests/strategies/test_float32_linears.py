"""A float32 Linear of a bf16 model computes in float32 in every preset; an adapter's may compute in bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.nn.norms import MSNorm, NormSettings, OutputUse
from tests.support.judge import assert_same_step
from tests.support.models import fill_adapters
from tests.support.saved import saved_storages
from tests.support.step import BF16

WIDTH, ROWS = 64, 24


class Block(nn.Module):
    """Like T5's: the last Linear stays in float32, and what it reads is cast to its weight's dtype.

    ``behind``: what is cast: the output of an activation, a gated product, a norm, a dropout or a chain.
    """

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.behind = behind
        self.wi, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.act, self.dropout = nn.RMSNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wi(x)
        if self.behind == "norm":
            h = self.norm(h)
        elif self.behind == "chain":
            h = h * torch.sigmoid(1.5 * h) * (self.gate(x) + 1)
        else:
            h = self.act(h)
        if self.behind == "gated":
            h = h * self.gate(x)
        elif self.behind == "dropout":
            h = self.dropout(h)
        return self.wo(h.to(self.wo.weight.dtype).view(2, -1, WIDTH))


def made(behind: str, trains: bool) -> nn.Module:
    torch.manual_seed(0)
    block = Block(behind).to(torch.bfloat16)
    block.wo.float().requires_grad_(trains)
    return nn.Sequential(block, nn.Identity())


def adapted(model: nn.Module, target: str) -> nn.Module:
    """With a LoRA in float32, which is PEFT's default."""
    torch.manual_seed(0)
    return fill_adapters(get_peft_model(model, LoraConfig(r=4, target_modules=[target])))


def is_bf16(values: Tensor) -> bool:
    """Whether a tensor has no digits but those of bf16."""
    return bool((values == values.to(torch.bfloat16)).all())


def seen(model: Any, x: Tensor) -> list[Tensor]:
    """The output of a float32 Linear and the gradient of its weight, or of an adapter's, of one step."""
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    grads = [
        p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and "wo" in name.split(".") and "bias" not in name
    ]
    return [y.detach(), *grads]


@pytest.mark.filterwarnings("ignore:nothing was patched")  # exact, and a frozen Linear
@pytest.mark.parametrize("preset", ["auto", "exact"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("behind", ["activation", "gated", "norm", "dropout", "chain"])
def test_a_linear_computes_in_float32(behind: str, trains: bool, preset: str) -> None:
    model = made(behind, trains)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    patch_model(model, preset, example_inputs=x)
    found = seen(model, x)
    assert len(found) == 1 + trains
    assert not any(map(is_bf16, found))


@pytest.mark.parametrize("behind", ["activation", "gated", "norm", "dropout", "chain"])
def test_a_float32_linear_with_an_adapter_computes_in_float32(behind: str) -> None:
    model = adapted(made(behind, trains=False), "wo")
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    patch_model(model, "auto", example_inputs=x)
    found = seen(model, x)
    assert len(found) == 3
    assert not any(map(is_bf16, found))


@pytest.mark.parametrize("behind", ["activation", "gated", "norm", "chain"])
def test_the_step_is_the_unpatched_one(behind: str) -> None:
    model = made(behind, trains=True)
    twin, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    patch_model(model, {"activations": "recompute"}, example_inputs=x)
    assert_same_step(model, twin, x, BF16)


class Routed(nn.Module):
    """A router whose product is in float32, by a weight that is cast as well."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.router = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.enter(x))
        scores = F.linear(h.type(torch.float32), self.router.type(torch.float32))
        return self.up(h), scores


@pytest.mark.parametrize("preset", ["auto", "exact"])
def test_a_router_computes_in_float32(preset: str) -> None:
    torch.manual_seed(0)
    model = Routed().to(torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    patch_model(model, preset, example_inputs=x)
    assert not is_bf16(model(x)[1])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_float32_adapter_of_a_bf16_linear_saves_no_float32_copy(dropout: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    config = LoraConfig(r=4, target_modules=["2"], lora_dropout=dropout)
    model = fill_adapters(get_peft_model(model.to(torch.bfloat16), config))
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    patch_model(model, "auto", example_inputs=x)
    sizes = saved_storages(lambda: model(x))[1].values()
    assert ROWS * WIDTH * 4 not in sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_returns_the_dtype_of_torchs_under_autocast(dtype: torch.dtype) -> None:
    """On a CPU, whose autocast leaves norms, that of its input; on a GPU float32."""
    stock, x = nn.LayerNorm(WIDTH), torch.randn(ROWS, WIDTH, dtype=dtype)
    settings = NormSettings(stock.eps, centered=True)
    norm = MSNorm(stock.weight, stock.bias, settings, use=OutputUse(full_precision_autocast=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == stock(x).dtype == dtype
