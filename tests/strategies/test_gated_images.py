"""Products in front of convolutions (squeeze and excitation, response norms) are computed again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.nn import chains
from lowmem_patch.nn.chain_steps import run
from tests.support.chained import chains_of
from tests.support.judge import assert_rounded, assert_same_step
from tests.support.step import AUTOCAST, BF16, DOUBLE, FP32, Mode, cast, step

CHANNELS, BATCH, SIZE = 8, 3, 12
FULL = BATCH * CHANNELS * SIZE * SIZE * 4  # bytes of an image in float32


class SqueezeExcitation(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(CHANNELS, 2, 1), nn.Conv2d(2, CHANNELS, 1)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()))


class ResponseNorm(nn.Module):
    """GRN of ConvNeXt V2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, CHANNELS, 1, 1))
        self.bias = nn.Parameter(torch.randn(1, CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        share = size / (size.mean(1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias, self.weight, x * share)


class Net(nn.Module):
    def __init__(self, gate: Callable[[], nn.Module], act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm, self.act, self.gate = nn.BatchNorm2d(CHANNELS), act(), gate()
        self.out = nn.Conv2d(CHANNELS, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gate(self.act(self.norm(self.stem(x))))).mean((2, 3))


def sigmoid() -> nn.Module:
    return SqueezeExcitation(nn.Sigmoid())


def hardsigmoid() -> nn.Module:
    return SqueezeExcitation(nn.Hardsigmoid())


GATES = [sigmoid, hardsigmoid, ResponseNorm]


def images(channels_last: bool = False) -> Tensor:
    x = torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return x.to(memory_format=torch.channels_last) if channels_last else x


def pair(gate: Callable[[], nn.Module], channels_last: bool = False, **settings: Any) -> Any:
    """A patched net and an unpatched one of the same weights."""
    torch.manual_seed(0)
    twin = Net(gate, **settings)
    if channels_last:
        twin = twin.to(memory_format=torch.channels_last)
    model = copy.deepcopy(twin)
    patch_model(model, "exact", example_inputs=(images(channels_last),))
    return model, twin


def saved(model: nn.Module, x: Tensor) -> int:
    with saved_bytes(model) as counted:
        y = model(x)
    assert y.requires_grad
    return counted.activations


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, nn.GELU])
@pytest.mark.parametrize("gate", GATES)
def test_a_gated_image_is_not_saved(gate: Any, act: Any, channels_last: bool) -> None:
    model, twin = pair(gate, channels_last, act=act)
    x = images(channels_last)
    assert chains_of(model) == ["gate"]
    # beside the net's input and rows of a few numbers: the input of the norm, in the place of those of the
    # activation, the gate and the last convolution
    own = saved(model, x)
    assert own == patch_report(model).saved_after
    assert FULL <= own - x.nbytes < 1.1 * FULL
    assert saved(twin, x) - x.nbytes > 2.9 * FULL
    assert_same_step(model, twin, x)


@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
@pytest.mark.parametrize("gate", GATES)
def test_a_step_of_low_precision(gate: Any, mode: Mode) -> None:
    torch.manual_seed(0)
    twin = cast(Net(gate), mode.weights)
    model = copy.deepcopy(twin)
    x = images().to(mode.weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        patch_model(model, "exact", example_inputs=(x,))
    assert chains_of(model) == ["gate"]
    assert_same_step(model, twin, x, mode)


@pytest.mark.parametrize("gate", GATES)
def test_a_backward_makes_the_gated_image_once(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the convolution's weight, and for the gradients of the image and the gate."""
    model, _ = pair(gate)
    loss = model(images()).square().sum()
    made = []
    monkeypatch.setattr(chains, "run", lambda *given: made.append(run(*given)) or made[-1])
    loss.backward()
    assert len(made) == 1


@pytest.mark.parametrize("gate", GATES)
def test_nothing_is_held_by_a_forward(gate: Any) -> None:
    """Values that readers have read are let go, those of an activation behind its last one."""
    model, _ = pair(gate)
    kept: list[Any] = []
    model.act.register_forward_hook(lambda module, args, y: kept.append(y))
    model.gate.register_forward_hook(lambda module, args, y: kept.append(y))
    y = model(images())
    assert len(kept) == 2 and all(one.held_values() is None for one in kept)
    y.sum().backward()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_net(gate: Any, reentrant: bool) -> None:
    model, twin = (one.double() for one in pair(gate))
    x = images().double().requires_grad_()

    def again(net: Any) -> Any:
        out = checkpoint(net, x, use_reentrant=reentrant)
        return torch.autograd.grad(out.square().sum(), [x], retain_graph=True)[0]

    if reentrant:  # which torch.autograd.grad does not go through
        for net in (model, twin):
            checkpoint(net, x, use_reentrant=True).square().sum().backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-10) for a, b in pairs)
    else:
        assert torch.allclose(again(model), again(twin), rtol=1e-10, atol=1e-12)


def test_a_backward_can_run_twice() -> None:
    model, twin = (one.double() for one in pair(sigmoid))
    x = images().double()
    for net in (model, twin):
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_two_convolutions_read_one_gated_image() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__(sigmoid)
            self.other = nn.Conv2d(CHANNELS, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.gate(self.act(self.norm(self.stem(x))))
            return (self.out(y) + self.other(y)).mean((2, 3))

    torch.manual_seed(0)
    twin = Two()
    model = copy.deepcopy(twin)
    patch_model(model, "exact", example_inputs=(images(),))
    assert chains_of(model) == ["gate"]
    assert saved(twin, images()) - saved(model, images()) > 1.9 * FULL
    assert_same_step(model, twin, images())


def test_a_frozen_convolution_saves_no_gated_image() -> None:
    """Torch saves it, though no gradient asks for it."""
    torch.manual_seed(0)
    twin = Net(sigmoid)
    twin.out.requires_grad_(False)
    model = copy.deepcopy(twin)
    patch_model(model, "exact", example_inputs=(images(),))
    assert chains_of(model) == ["gate"]
    assert saved(twin, images()) - saved(model, images()) > 1.9 * FULL
    assert_same_step(model, twin, images())


def test_a_write_into_the_gated_image_is_seen() -> None:
    model, twin = pair(sigmoid)
    for net in (model, twin):
        net.gate.register_forward_hook(lambda module, args, y: y.mul_(2.0))
    assert_same_step(model, twin, images())


@pytest.mark.parametrize("name", ["efficientnet_b0", "mobilenetv3_small_100", "convnextv2_atto"])
def test_models_of_timm(name: str) -> None:
    torch.manual_seed(0)
    twin = timm.create_model(name, drop_rate=0.0, drop_path_rate=0.0, num_classes=3).double()
    for parameter in twin.parameters():  # GRN begins with zeros
        torch.nn.init.normal_(parameter, std=0.2)
    model = copy.deepcopy(twin)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    patch_model(model, "exact", example_inputs=(x,))
    assert len(chains_of(model)) > 5
    found, expected = (step(one, x, DOUBLE, count=True) for one in (model, twin))
    assert found.saved < 0.5 * expected.saved
    assert_rounded(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("gate", GATES)
def test_copies_and_compiled_nets_train_alike(gate: Any) -> None:
    model, twin = (one.double() for one in pair(gate))
    x = images().double()
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    expected = step(twin, x)
    for net in (model, *others):
        assert_rounded(step(net, x), expected)
    assert torch.allclose(compiled(x), expected.outputs[0], rtol=1e-10, atol=1e-10)
    assert torch.allclose(model.eval()(x), twin.eval()(x), rtol=1e-10, atol=1e-10)


def test_an_unpatched_net_is_as_it_was() -> None:
    model, twin = pair(sigmoid)
    unpatch_model(model)
    x = images()
    assert saved(model, x) == saved(twin, x)
    assert torch.equal(step(model, x, FP32).outputs[0], step(twin, x, FP32).outputs[0])
