"""Every named activation of transformers and timm: matched by what it computes, or said to be none."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from timm.layers.create_act import _ACT_LAYER_DEFAULT, get_act_layer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import ACT2FN

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.nn.activations import CodesActivation, RecomputedActivation
from lowmem_patch.nn.deferred_ops import Activation
from tests.support.configs import SHARE
from tests.support.judge import assert_equal_steps
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
        left = "act" not in sites or (sites["act"].kind, sites["act"].strategy) == ("other", "keep")
        assert left or sites["act"].kind == "chain"  # of its own functions
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


class Counting(nn.Module):
    """A SiLU that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return nn.functional.silu(x)


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) * (2 if self.training else 1)


@pytest.mark.parametrize("act", [Counting, Louder])
def test_an_activation_that_does_more_in_training_stays(act: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), act(), nn.Linear(8, 8))
    twin, x = copy.deepcopy(model), torch.randn(3, 8)
    with warnings.catch_warnings(action="ignore"):  # nothing may be left to patch
        report = patch_report(patch_model(model, "exact", example_inputs=(x,)))
    assert "1" not in {site.name for site in report.patched if site.kind != "chain"}
    assert_equal_steps(model, twin, x)
    for buffer, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other)


class Power(nn.Module):
    """A power of an activation, whose exponent is a tensor."""

    exponent: Any

    def __init__(self, act: nn.Module, exponent: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.exponent = act, nn.Parameter(exponent)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) ** self.exponent)


@pytest.mark.parametrize("exponent", [torch.tensor(2.0), torch.full((8,), 2.0)], ids=["one", "row"])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Sigmoid()], ids=str)
def test_an_exponent_that_trains_has_its_gradient(act: nn.Module, exponent: Tensor) -> None:
    model = Power(act, exponent.clone())
    twin, x = copy.deepcopy(model), torch.randn(3, 8)
    with warnings.catch_warnings(action="ignore"):  # nothing may be left to patch
        patch_model(model, "exact", example_inputs=(x,))
    assert_equal_steps(model, twin, x)


def test_an_exponent_may_become_a_tensor_after_the_patch() -> None:
    model = Power(nn.ReLU(), torch.tensor(2.0))
    exponent, x = model.exponent, torch.randn(3, 8)
    del model.exponent
    model.exponent = 2
    patch_model(model, "exact", example_inputs=(x,))
    del model.exponent
    model.exponent = exponent
    model(x).sum().backward()
    assert model.exponent.grad is not None


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * s * (1 + x * (1 - s))


class Customised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(Swish.apply(self.up(x)))
        return y


def test_a_custom_function_in_a_forward_has_a_row() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Customised(), nn.GELU(), nn.Linear(8, 8))
    report = plan_patch(model, "exact", example_inputs=torch.randn(3, 8))
    (row,) = (site for site in report.left_alone if site.name == "1.Swish()")
    assert "custom autograd function" in row.reason
    assert row.bytes_before == row.bytes_after == 3 * 16 * 4


def test_softplus_is_computed_in_the_dtype_of_a_gpus_autocast() -> None:
    was = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x = torch.empty(4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for kind, act in {"softplus": nn.Softplus(), "silu": nn.SiLU()}.items():
                for patched in (RecomputedActivation(Activation(kind)), CodesActivation(kind)):  # type: ignore[arg-type]
                    assert patched(x).dtype == act(x).dtype
    finally:
        torch.set_autocast_enabled("cuda", was)
