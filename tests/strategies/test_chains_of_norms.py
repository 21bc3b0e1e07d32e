"""Chains that begin at norms: how far they reach, what they cost, and how their values lie in memory."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.functional import LowRank, PackedWeight, recomputed_linear
from lowmem_patch.nn.chain_steps import run
from tests.strategies.test_modulated_norms import BATCH, FULL, WIDTH, Net, inputs
from tests.support.judge import assert_close, assert_same_step


class Body(nn.Module):
    """A norm between two Linears; ``body(self, x)`` calls it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.down, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def of_bodies(body: Any, count: int = 1) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Body(body) for _ in range(count)))


def with_its_input_squared(net: Any, x: Tensor) -> Tensor:
    return net.down(net.norm(x) * net.scale + 0.1) + x.square()


def with_its_input_in_a_linear(net: Any, x: Tensor) -> Tensor:
    return net.down(net.norm(x) * net.scale + 0.1) + net.other(x)


@pytest.mark.parametrize("body", [with_its_input_squared, with_its_input_in_a_linear])
def test_a_norm_whose_input_others_save_is_known_as_well(body: Any) -> None:
    """Its output is saved for the scale, and the modulated one is not."""
    model = of_bodies(body)
    model[1].scale.requires_grad_(True)
    twin = copy.deepcopy(model)
    x = inputs()[0]
    patch_model(model, "exact", example_inputs=(x,))
    sizes = []
    for one in (twin, model):
        with saved_bytes(one) as counted:
            one(x)
        sizes.append(counted.total)
    assert sizes[0] - sizes[1] >= FULL
    assert_same_step(model, twin, (x,))


def test_a_residual_stream_is_not_added_up_anew_in_each_block(monkeypatch: Any) -> None:
    """``x + norm(y)`` in front of Linears is made again of x, which the block in front has made."""

    def body(net: Any, x: Tensor) -> Tensor:
        y = x + net.norm(net.down(x))
        return y + net.norm(net.other(y))

    steps: list[int] = []

    def counted(last: Any, values: Any) -> Tensor:
        steps.append(len(values))
        return run(last, values)

    model = of_bodies(body, count=6)
    twin = copy.deepcopy(model)
    x = inputs()[0]
    patch_model(model, "exact", example_inputs=(x,))
    monkeypatch.setattr("lowmem_patch.nn.chains.run", counted)
    model(x).sum().backward()
    assert steps and max(steps) <= 3  # x and two norms
    assert_same_step(model, twin, (x,))


def test_a_norm_that_a_product_reads_lies_as_torch_makes_it() -> None:
    """A view that torch's own norm allows, of an input that is transposed."""

    def body(net: Any, x: Tensor) -> Tensor:
        return net.down((net.norm(x.transpose(0, 1)) * net.scale).view(-1, WIDTH))

    model = of_bodies(body)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=inputs()[:1])
    assert_same_step(model, twin, inputs()[:1])


def test_values_that_several_linears_read_are_computed_once_and_freed(monkeypatch: Any) -> None:
    """A view of a value holds it, so that it may hold none: no garbage collector would see the circle."""
    given = inputs()
    model = patch_model(Net().double(), "exact", example_inputs=given)
    made: list[Any] = []
    model.blocks[0].attention.register_forward_pre_hook(lambda _, args: made.append(args[0]))
    runs: list[Any] = []
    monkeypatch.setattr(
        "lowmem_patch.nn.chains.run", lambda *args: runs.append(args[0]) or run(*args)
    )
    loss = model(*(tensor.double() for tensor in given)).sum()
    assert type(made[0]).__name__ == "Unstored"
    first = made[0].op.last
    assert sum(step is first for step in runs) == 1  # for q, k, v and up
    value = weakref.ref(made[0])
    loss.backward()
    made.clear()
    assert value() is None


def test_images_whose_channels_lie_last_stay_so() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor, image: Tensor) -> Tensor:
            rows = self.down(torch.cat([x, F.gelu(self.up(x))], 1))
            image = self.conv(image)
            both = torch.cat([image, F.gelu(image)], 1)
            return rows.sum() + both.permute(0, 2, 3, 1).view(-1, 8)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Images()

        def forward(self, x: Tensor, image: Tensor) -> Tensor:
            return self.inner(x, image)

    torch.manual_seed(0)
    model = Outer()
    twin = copy.deepcopy(model)
    image = torch.randn(BATCH, 4, 5, 5).to(memory_format=torch.channels_last)
    given = (inputs()[0], image)
    patch_model(model, "exact", example_inputs=given)
    assert_same_step(model, twin, given)


def test_an_adapter_beside_a_packed_weight_saves_what_its_input_is_made_of() -> None:
    """As of QLoRA: the weight is unpacked for each product, and the input computed again."""
    torch.manual_seed(0)
    weight = torch.randn(5, WIDTH, dtype=torch.float64)
    packed = PackedWeight(weight.clone, weight.shape, weight.dtype, weight.device)
    lows = [torch.randn(*size, dtype=torch.float64) for size in ((2, WIDTH), (5, 2))]
    z = torch.randn(4, WIDTH, dtype=torch.float64)
    saved: list[torch.Size] = []
    found = []
    for ours in (True, False):
        source, *adapter = (t.clone().requires_grad_() for t in (z, *lows))
        x = source * 2.0
        if ours:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.append(t.shape) or t, lambda t: t
            ):
                y = recomputed_linear(
                    x, lambda s, dtype: (s * 2.0).to(dtype), (source.detach(),), packed, None,
                    torch.float64, LowRank(*adapter, 0.5),
                )  # fmt: skip
        else:
            y = F.linear(x, weight) + 0.5 * F.linear(F.linear(x, adapter[0]), adapter[1])
        y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in (source, *adapter))])
    assert weight.shape not in saved
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, "value or gradient")


class BesideAStockNorm(nn.Module):
    """A chain, and sums like its own that begin at a norm which nobody would patch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y1, y2 = self.a(x), self.b(x)
        chain = y1 * (1 + y1) + y1
        return (self.norm(x) + 1) + y2 + chain.mean(1, keepdim=True)


def test_what_a_norm_that_is_left_alone_makes_is_counted_beside_a_chain() -> None:
    """Its sums would wait as those of the chain do, and save more than that saves less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), BesideAStockNorm())
    twin = copy.deepcopy(model)
    x = torch.randn(2, 50, WIDTH)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(model, "exact", example_inputs=(x,))
    sizes = []
    for one in (twin, model):
        with saved_bytes(one) as counted:
            assert one(x).requires_grad
        sizes.append(counted.total)
    assert sizes[1] <= sizes[0]
