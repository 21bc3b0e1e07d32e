"""Every named activation of transformers and timm: matched by what it computes, or said to be none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.layers.create_act import _ACT_LAYER_DEFAULT, get_act_layer
from torch import nn
from transformers.activations import ACT2FN

from lowmem_patch import plan_patch
from tests.support.configs import SHARE
from tests.support.toys import Toy, assert_same_steps, batch, patched_twin

# names to kinds; every other name of the two libraries must be left alone
KINDS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "celu": "elu",  # the same with alpha 1
    "elu": "elu",
    "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish",
    "hardsigmoid": "hardsigmoid",
    "hardswish": "hardswish",
    "leaky_relu": "leaky_relu",
    "mish": "mish",
    "relu6": "relu6",
    "selu": "selu",
}
# torch saves their output, which the next Linear keeps anyway
OUTPUT_SAVED = {"relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
NAMES = [
    *(f"transformers/{name}" for name in sorted(ACT2FN)),
    *(f"timm/{name}" for name in sorted(_ACT_LAYER_DEFAULT)),
]


def made(name: str) -> Any:
    library, _, kind = name.partition("/")
    return ACT2FN[kind] if library == "transformers" else get_act_layer(kind)()


def far_out(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Inputs of the activation go beyond 10 on both sides, where a clipped GELU is none."""
    return net.down(net.act(12 * net.up(net.norm(x)))) / 12


def with_activation(activation: nn.Module) -> Toy:
    net = Toy(far_out)
    net.act = copy.deepcopy(activation)
    return net


@pytest.mark.parametrize("name", NAMES)
def test_each_named_activation_is_matched_or_left_alone(name: str) -> None:
    net = with_activation(made(name))
    sites = {site.name: site for site in plan_patch(net, "exact", example_inputs=batch()).sites}
    function = name.partition("/")[2]
    kind = KINDS.get(function)
    if function in OUTPUT_SAVED:
        assert (sites["act"].kind, sites["act"].strategy) == (OUTPUT_SAVED[function], "keep")
        assert "nothing to gain" in sites["act"].reason
    elif kind is None:
        assert "act" not in sites or (sites["act"].kind, sites["act"].strategy) == ("other", "keep")
    else:
        assert (sites["act"].kind, sites["act"].strategy) == (kind, "recompute")


@pytest.mark.parametrize("name", NAMES)
def test_each_named_activation_keeps_its_function_and_gradients(name: str) -> None:
    assert_same_steps(*patched_twin(with_activation(made(name)), SHARE))


def test_activation_that_is_another_one_far_out() -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x).clamp(max=100.0)

    sites = plan_patch(with_activation(Late()), "exact", example_inputs=batch()).sites
    assert "act" not in {site.name for site in sites}
