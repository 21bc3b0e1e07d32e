"""Convolutions that read a deferred tensor: as torch's own, in less Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import READERS, Unstored
from lowmem_patch.nn.deferred_ops import Activation
from tests.support.judge import BAND, assert_same_step
from tests.support.step import AUTOCAST

Given = dict[str, Any]

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Given]] = {
    "1d": ((2, 4, 9), (6, 4, 3), {"padding": 1}),
    "2d": ((2, 4, 9, 7), (6, 4, 3, 3), {"stride": (2, 1), "padding": (1, 0)}),
    "3d": ((2, 4, 5, 4, 3), (6, 4, 2, 2, 2), {}),
    "groups": ((2, 4, 9, 7), (8, 2, 3, 3), {"groups": 2, "dilation": 2}),
    "depthwise": ((2, 4, 9, 7), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "point": ((2, 4, 9, 7), (6, 4, 1, 1), {}),
    "same": ((2, 4, 9, 7), (6, 4, 3, 3), {"padding": "same"}),
    "one image": ((4, 9, 7), (6, 4, 3, 3), {}),
}
BY_DIMENSIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
TORCHS_OWN = ("same", "one image")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators for which torch has asked the class of deferred tensors."""
    names: list[str] = []
    dispatch = Unstored.__dict__["__torch_dispatch__"].__func__

    def noted(cls: Any, func: Any, *rest: Any) -> Any:
        names.append(func.overloadpacket.__name__)
        return dispatch(cls, func, *rest)

    monkeypatch.setattr(Unstored, "__torch_dispatch__", classmethod(noted))
    return names


def deferred(x: Tensor) -> Unstored:
    return defer(Activation("silu", reads=2), (x,))


def tensors(shape: tuple[int, ...], weight: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(shape), torch.randn(weight), torch.randn(weight[0])]
    return [one.requires_grad_() for one in found]


def run(convolution: Callable[..., Tensor], given: list[Tensor], h: Tensor) -> list[Any]:
    """The output and the gradients."""
    y = convolution(h, *given[1:])
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [y.detach(), *(one.grad for one in given)]


def by_torch(convolution: Callable[..., Tensor], given: list[Tensor], h: Tensor) -> list[Any]:
    """The same, where no reader knows convolutions."""
    known = {name: READERS.pop(name) for name in ("conv1d", "conv2d", "conv3d")}
    try:
        return run(convolution, given, h)
    finally:
        READERS.update(known)


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_gives_torchs_bits(name: str, autocast: bool, asked: list[str]) -> None:
    shape, weight, settings = CASES[name]

    def convolution(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return BY_DIMENSIONS[len(weight)](*given, **settings)

    given, twin = tensors(shape, weight), tensors(shape, weight)
    found = run(convolution, given, deferred(given[0]))
    assert bool(asked) == (name in TORCHS_OWN)
    expected = by_torch(convolution, twin, deferred(twin[0]))
    assert_same_bits(found, expected)


def test_channels_that_lie_last_stay_so() -> None:
    shape, weight, _ = CASES["2d"]
    given, twin = tensors(shape, weight), tensors(shape, weight)
    found, expected = (
        call(F.conv2d, own, deferred(own[0].to(memory_format=torch.channels_last)))
        for call, own in ((run, given), (by_torch, twin))
    )
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2)])
def test_frozen_tensors_get_no_gradient(frozen: tuple[int, ...]) -> None:
    shape, weight, _ = CASES["2d"]
    given, twin = tensors(shape, weight), tensors(shape, weight)
    for own in (given, twin):
        for place in frozen:
            own[place].requires_grad_(False)
    found = run(F.conv2d, given, deferred(given[0]))
    expected = by_torch(F.conv2d, twin, deferred(twin[0]))
    assert_same_bits(found, expected)


def test_a_weight_read_twice_under_autocast_gets_both_gradients() -> None:
    """A cast that autocast caches without a gradient would lose the plain reader's."""
    shape, weight = (2, 4, 9, 7), (4, 4, 3, 3)

    def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(F.conv2d(x, w, b), w)

    given, twin = tensors(shape, weight), tensors(shape, weight)
    found = run(twice, given, deferred(given[0]))
    expected = run(twice, twin, F.silu(twin[0]))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= BAND * torch.finfo(torch.bfloat16).eps * other.norm()


def test_a_write_into_the_weight_before_backward_is_an_error() -> None:
    given = tensors(*CASES["2d"][:2])
    y = F.conv2d(deferred(given[0]), given[1])
    with torch.no_grad():
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_saved_tensors_see_the_values() -> None:
    shape, weight, _ = CASES["2d"]
    given, twin = tensors(shape, weight), tensors(shape, weight)
    with torch.autograd.graph.save_on_cpu():
        found = run(F.conv2d, given, deferred(given[0]))
        expected = by_torch(F.conv2d, twin, deferred(twin[0]))
    assert_same_bits(found, expected)


def test_mixed_dtypes_raise_torchs_error() -> None:
    x, weight, _ = tensors(*CASES["2d"][:2])
    with pytest.raises(RuntimeError, match="type"):
        F.conv2d(deferred(x), weight.double())


REFUSED: dict[str, Callable[..., Tensor]] = {
    "a bias of another dtype": lambda h, w, b: F.conv2d(h, w, b.double()),
    "more dimensions": lambda h, w, b: F.conv1d(h, w, b),
    "fewer dimensions": lambda h, w, b: F.conv3d(h, w, b),
    "a double weight under autocast": lambda h, w, b: in_autocast(h, w.double(), b),
    "a double bias under autocast": lambda h, w, b: in_autocast(h, w, b.double()),
}


def in_autocast(*given: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.conv2d(*given)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_torchs_error(name: str) -> None:
    x, *rest = tensors(*CASES["2d"][:2])
    messages = []
    for h in (deferred(x), F.silu(x)):
        with pytest.raises(RuntimeError) as error:
            REFUSED[name](h, *rest)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("stride", [np.int64(2), torch.tensor(2)], ids=["numpy", "tensor"])
def test_a_setting_may_be_a_number_of_others(stride: Any) -> None:
    shape, weight, _ = CASES["2d"]
    given, twin = tensors(shape, weight), tensors(shape, weight)
    convolution = partial(F.conv2d, stride=stride)
    found = run(convolution, given, deferred(given[0]))
    assert_same_bits(found, by_torch(convolution, twin, deferred(twin[0])))


def test_values_go_once_forward_and_backward_have_read_them() -> None:
    given = tensors(*CASES["2d"][:2])
    x = (
        given[0] * 1
    )  # no leaf, which an optimizer may write, so that values would be held for who keeps h
    h = defer(Activation("silu", reads=1), (x,))
    y = F.conv2d(h, given[1])
    assert h.held_values() is None
    y.sum().backward()
    assert h.held_values() is None


class Adapted(nn.Module):
    """PEFT's LoRA of a convolution: lora_A reads the activation in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base = nn.Conv2d(4, 16, 3), nn.Conv2d(16, 8, 1)
        self.lora_A, self.act = nn.Conv2d(16, 4, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x))
        return torch.cat([self.base(hidden), self.lora_A(hidden.float())], 1)


def test_values_of_a_cast_go_as_well() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Adapted()), torch.randn(2, 4, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        ours = patch_model(copy.deepcopy(model), "exact", example_inputs=x)
        with saved_bytes(ours) as after:
            ours(x)
    hidden = 2 * 16 * 5 * 5
    assert after.activations == 2 * x.numel() + 2 * hidden  # the input's cast and that of SiLU's
    assert_same_step(ours, model, x, AUTOCAST)
