"""A gradient that is undefined is none: parameters behind it get none, and an optimizer passes them by.

Functions that hand on undefined gradients are those of DDP with unused parameters, of early exits and of
stopped gradients. Of zeros an optimizer would make states, and apply weight decay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.functional import (
    ExpertWeight,
    RecomputedMatmul,
    gather,
    matrix_product,
    packed_dropout,
    recast_matmul,
    recomputed_linear,
)
from tests.support.models import FAMILIES

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

NAMES = ("llama", "gemma", "bert", "phi3", "t5", "timm-vit", "timm-swin")


class HandsOn(torch.autograd.Function):
    """Several tensors through one node, as DDP's of the outputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def adapted(model: Any, name: str) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=FAMILIES[name].linears))


def with_gradient(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("preset", ["exact", "auto", "compact"])
@pytest.mark.parametrize("trains", ["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_gradient_leaves_all_without_one(
    name: str, trains: str, preset: str, make: Callable[[str], Any]
) -> None:
    inputs = FAMILIES[name].inputs()
    model = make(name) if trains == "full" else adapted(make(name), name)
    model = patch_model(model.train(), preset, example_inputs=inputs)
    output = model(**inputs)
    output = output if isinstance(output, Tensor) else output[0]
    Stops.apply(output).sum().backward()
    assert not with_gradient(model)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_the_loss_does_not_use_gets_none(name: str, make: Callable[[str], Any]) -> None:
    inputs = FAMILIES[name].inputs()

    def trained(model: Any) -> set[str]:
        found = model(**inputs, output_hidden_states=True)
        first, _ = HandsOn.apply(found.hidden_states[1], found[0])
        first.square().sum().backward()
        return with_gradient(model)

    stock = make(name).train()
    model = patch_model(copy.deepcopy(stock), "auto", example_inputs=inputs)
    wanted = trained(stock)
    assert wanted and wanted < {name for name, _ in stock.named_parameters()}
    assert trained(model) == wanted


def again(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.to(dtype or x.dtype)


WEIGHT = torch.randn(4, 4)
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, w: gather((x @ w), 1, torch.tensor([[0, 1], [2, 3], [1, 1]])),
    "dropout": lambda x, w: packed_dropout(x @ w, 0.5)[0],
    "matmul of casts": lambda x, w: recast_matmul(x[None], w[None], torch.bfloat16),
    "recomputed Linear": lambda x, w: recomputed_linear(x, again, (x,), w, None, torch.float32),
    "recomputed matmul": lambda x, w: RecomputedMatmul(
        matrix_product, again, x, ExpertWeight(w), None, (x,)
    ).product(),
}


@pytest.mark.parametrize("op", OPS)
def test_each_op_hands_it_on(op: str) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), WEIGHT.clone().requires_grad_()
    Stops.apply(OPS[op](x, weight)).sum().backward()
    assert x.grad is None and weight.grad is None
