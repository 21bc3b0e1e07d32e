"""Chains of tensors that lie in any order, read through any rearrangement, and what of a chain is saved."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.nn.chain_steps import Described, laid_out
from tests.support.chained import CHAINS, chains_of
from tests.support.judge import assert_same_step
from tests.support.models import randomise
from tests.support.step import AUTOCAST, BF16, cast, step

CHANNELS, SIDE, BATCH = 8, 4, 2
FULL = BATCH * CHANNELS * SIDE * SIDE * 4  # bytes of a tensor of all rows


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, CHANNELS, SIDE, SIDE, generator=generator).requires_grad_()


class Net(nn.Module):
    """``body(self, a, b)`` reads two tensors [B, C, H, W] that convolutions made."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(2))
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.down = nn.Linear(CHANNELS, CHANNELS)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.first(x), self.second(x))


def network(body: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), Net(body))


def saved(model: Any) -> int:
    with saved_bytes(model) as counted:
        model(images())
    return counted.activations


def turned(t: Tensor) -> Tensor:
    """The same values, with the channels last in memory."""
    return t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def focal(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((a * b).permute(0, 2, 3, 1).contiguous())


def of_turned(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((turned(a) * turned(b)).permute(0, 2, 3, 1).contiguous())


def of_one_turned(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((turned(a) * b).permute(0, 2, 3, 1).reshape(BATCH, -1, CHANNELS))


def of_other_turned(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((a * turned(b)).permute(0, 2, 3, 1).contiguous())


def scaled(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((a * b * b.mean((2, 3), keepdim=True)).permute(0, 2, 3, 1).contiguous())


def convolved(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.conv((turned(a) * b).transpose(2, 3))


BODIES = (focal, of_turned, of_one_turned, of_other_turned, scaled, convolved)


@pytest.mark.parametrize("body", BODIES)
def test_a_product_that_is_read_rearranged_is_not_saved(body: Any) -> None:
    model = network(body)
    twin = copy.deepcopy(model)
    patch_model(model, CHAINS, example_inputs=(images(),))
    assert chains_of(model) == ["1"]
    assert saved(twin) - saved(model) >= FULL
    found, expected = (step(net, images(), seed=7) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert_same_step(model, twin, images())


@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
@pytest.mark.parametrize("body", [focal, of_one_turned])
def test_rearranged_products_in_low_precision(body: Any, mode: Any) -> None:
    model = cast(network(body), mode.weights)
    twin = copy.deepcopy(model)
    x = images().to(mode.weights).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, CHAINS, example_inputs=(x,))
    found, expected = (step(net, x, mode, seed=7, count=True) for net in (model, twin))
    assert torch.equal(found.output, expected.output) and found.saved < expected.saved
    assert_same_step(model, twin, x, mode)


@pytest.mark.parametrize(("planned", "run"), list(itertools.permutations(BODIES, 2)))
def test_tensors_may_lie_otherwise_than_planned(planned: Any, run: Any) -> None:
    model = network(planned)
    twin = copy.deepcopy(model)
    patch_model(model, CHAINS, example_inputs=(images(),))
    model[1].body = twin[1].body = run
    assert_same_step(model, twin, images())


def viewed_wrongly(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((a * b).transpose(1, 3).view(-1, CHANNELS))


def written(net: Any, a: Tensor, b: Tensor) -> Tensor:
    return net.down((a * b).permute(0, 2, 3, 1).mul_(2.0).contiguous())


def hooked(net: Any, a: Tensor, b: Tensor) -> Tensor:
    y = (a * b).permute(0, 2, 3, 1)
    y.register_hook(lambda gradient: 3.0 * gradient)
    return net.down(y)


def read_otherwise(net: Any, a: Tensor, b: Tensor) -> Tensor:
    y = (a * b).permute(0, 2, 3, 1).contiguous()
    return net.down(y) + y.softmax(-1)


@pytest.mark.parametrize("run", [written, hooked, read_otherwise])
def test_any_use_of_a_rearranged_product_is_right(run: Any) -> None:
    model = network(focal)
    twin = copy.deepcopy(model)
    patch_model(model, CHAINS, example_inputs=(images(),))
    model[1].body = twin[1].body = run
    assert_same_step(model, twin, images())


def test_a_view_that_torch_refuses_is_refused() -> None:
    model = network(focal)
    patch_model(model, CHAINS, example_inputs=(images(),))
    model[1].body = viewed_wrongly
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        model(images())


def test_the_result_lies_as_torch_lays_it() -> None:
    """Every pair of orders of three dimensions, of whole tensors and of ones that are broadcast."""
    orders = list(itertools.permutations(range(3)))
    for first, second in itertools.product(orders, orders):
        for shape in ((2, 3, 4), (2, 1, 4), (1, 3, 1)):
            a = torch.randn([(2, 3, 4)[i] for i in first]).permute(_inverse(first))
            b = torch.randn([shape[i] for i in second]).permute(_inverse(second))
            for func, args in (
                (torch.mul, (a, b)),
                (torch.rsub, (a, b)),
                (torch.where, (b > 0, a, b)),
            ):
                made: Tensor = func(*args)
                described = Described.of(args, {})
                assert laid_out(func, described) == (made.shape, made.stride())


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


@pytest.mark.parametrize("cached", [False, True])
def test_short_convolutions_of_lfm_2(cached: bool) -> None:
    """Bx, the convolution's input, and C times its output are computed again, the latter through a transpose;
    a cache copies the end of Bx, which is saved then."""
    config = transformers.Lfm2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, layer_types=["conv", "full_attention"], use_cache=cached,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomise(transformers.Lfm2ForCausalLM(config)).train()
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (2, 12), generator=generator)
    inputs = {"input_ids": tokens, "labels": tokens}
    patch_model(model, "exact", example_inputs=inputs)
    assert "model.layers.0.conv" in chains_of(model)
    with saved_bytes(model) as counted:
        model(**inputs)
    held = [
        one for one in counted.storages if one.savers[0].module.startswith("model.layers.0.conv")
    ]
    full = tokens.numel() * config.hidden_size * 4
    assert sum(one.bytes for one in held) // full == (5 if cached else 4)  # B, C, x, conv
    assert_same_step(model, twin, inputs)


class Block(nn.Module):
    """A block of a vocoder: an activation without a table, of a sum of two tensors that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x) + self.convs[1](x)
        return x + self.convs[2](F.leaky_relu(x, 0.1))


def test_a_sum_is_saved_and_what_an_activation_makes_of_it_is_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), Block())
    twin = copy.deepcopy(model)
    patch_model(model, CHAINS, example_inputs=(images(),))
    assert chains_of(model) == ["1"]
    # the images, what two convolutions read, and the sum; unpatched the activation's output as well
    assert (saved(twin), saved(model)) == (4 * FULL, 3 * FULL)
    found, expected = (step(net, images(), seed=7) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert_same_step(model, twin, images())


class Attractors(nn.Module):
    """Several chains of one large tensor, as ZoeDepth's, each with a small one beside."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.points = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        points, centers = self.points(x), self.centers(x)
        found = torch.zeros_like(centers)
        for i in range(3):
            distance = points[:, i : i + 1] - centers
            found = found + distance / (1 + 300 * distance.pow(2))
        return found


def test_chains_of_one_tensor_save_it_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), Attractors())
    twin = copy.deepcopy(model)
    patch_model(model, CHAINS, example_inputs=(images(),))
    # what the layers read, and centers and points in the place of distances and what they are divided by
    points = 3 * FULL // CHANNELS
    assert (saved(twin), saved(model)) == ((2 + 6) * FULL, 3 * FULL + points)
    assert_same_step(model, twin, images())
