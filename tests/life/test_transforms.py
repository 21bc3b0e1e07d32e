"""Under torch.func and in forward mode a patched model gives what the unpatched one gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowmem_patch import patch_model
from tests.support.judge import assert_gradients
from tests.support.models import FAMILIES, build, fill_adapters
from tests.support.step import FP32, Step

Weights = dict[str, Tensor]
Transform = Callable[[Any, Any], Weights]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # inside torch.func.jvp
]


@pytest.fixture(autouse=True)
def plain_attention() -> Iterator[None]:
    """Torch's fused attention knows neither forward mode nor a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def loss_of(model: Any, weights: Weights, x: Tensor) -> Tensor:
    output = functional_call(model, weights, (x,))
    y: Tensor = output if isinstance(output, Tensor) else output[0]
    return y.square().mean()


def trained(model: Any) -> Weights:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def of_each_row(model: Any, x: Tensor) -> Weights:
    def loss(weights: Weights, row: Tensor) -> Tensor:
        return loss_of(model, weights, row[None])

    found: Weights = vmap(grad(loss), in_dims=(None, 0))(trained(model), x)
    return found


def of_an_ensemble(model: Any, x: Tensor) -> Weights:
    """Autograd is around vmap, in which no tensor tells that it asks for a gradient."""
    stacked = {
        name: torch.stack((p, p * 0.5)).requires_grad_() for name, p in trained(model).items()
    }
    vmap(lambda weights: loss_of(model, weights, x))(stacked).sum().backward()
    return {name: p.grad for name, p in stacked.items() if p.grad is not None}


def of_an_ensemble_by_grad(model: Any, x: Tensor) -> Weights:
    stacked = {name: torch.stack((p, p * 0.5)) for name, p in trained(model).items()}
    found: Weights = grad(lambda s: vmap(lambda weights: loss_of(model, weights, x))(s).sum())(
        stacked
    )
    return found


def tangent(model: Any, x: Tensor) -> Weights:
    weights = trained(model)
    moved = {name: torch.ones_like(p) for name, p in weights.items()}
    return {"loss": jvp(lambda given: loss_of(model, given, x), (weights,), (moved,))[1]}


def second_derivative(model: Any, x: Tensor) -> Weights:
    def slope(weights: Weights) -> Tensor:
        first = grad(lambda given: loss_of(model, given, x))(weights)
        return torch.stack([one.sum() for one in first.values()]).sum()

    found: Weights = grad(slope)(trained(model))
    return found


TRANSFORMS = (of_each_row, of_an_ensemble, of_an_ensemble_by_grad, tangent, second_derivative)


def made(name: str, trains: str) -> tuple[Any, Any]:
    family = FAMILIES[name]
    model = build(family)
    if trains == "lora":
        config = LoraConfig(r=2, target_modules=family.linears)
        model = fill_adapters(get_peft_model(model, config))
    x = next(iter(family.inputs().values()))
    return model.train(), x


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("name", "trains", "preset"),
    [
        ("llama", "full", "exact"),
        ("llama", "lora", "auto"),
        ("bert", "full", "compact"),
        ("timm-vit", "lora", "auto"),
    ],
)
def test_gives_what_the_unpatched_model_gives(
    name: str, trains: str, preset: str, transform: Transform
) -> None:
    model, x = made(name, trains)
    own = Step([], transform(model, x))
    truth = Step(
        [], transform(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x)
    )
    patched = patch_model(model, preset, example_inputs=(x,))
    assert_gradients(Step([], transform(patched, x)), own, truth, FP32)
