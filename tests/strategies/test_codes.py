"""Codes: an activation whose input nobody else saves keeps a few bits of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowmem_patch import PatchConfig, patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch.nn.activations import CodesActivation
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support.judge import assert_equal
from tests.support.step import step
from tests.support.toy_blocks import built
from tests.support.toy_gates import SharedInput
from zoo.build import Built, randomise
from zoo.judge import judge


class InPlaceConv(nn.Module):
    """A SiLU that overwrites its input; ``returned`` or not, the next layer reads the result."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.act = nn.SiLU(inplace=True)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        result = self.act(hidden)
        return self.second(result if self.returned else hidden)


@pytest.mark.parametrize("returned", [True, False])
def test_in_place_activation_keeps_codes_in_place(returned: bool) -> None:
    torch.manual_seed(0)
    model, x = InPlaceConv(returned), torch.randn(2, 3, 9, 9)
    with saved_bytes(model) as before:
        expected = model(x)
    config = PatchConfig(activations="codes", bits=3)
    patched = patch_model(copy.deepcopy(model), config, example_inputs=x)
    assert patch_report(patched).sites[0].strategy == "codes"
    with saved_bytes(patched) as after:
        found = patched(x)
    assert torch.equal(found, expected)
    hidden = 2 * 8 * 7 * 7
    assert before.activations - after.activations == 4 * hidden - 3 * hidden // 8
    # the gradient of a stock model whose SiLU has the step table's derivative
    twin = copy.deepcopy(model)
    twin.act = CodesActivation("silu", 3)
    reference = twin.second(twin.act(twin.first(x)))
    found.square().sum().backward()
    reference.square().sum().backward()
    for one, two in zip(patched.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    with torch.no_grad():
        assert torch.equal(patched(x), expected)


def test_auto_approximates_behind_no_convolution() -> None:
    model, x = InPlaceConv(returned=False), torch.randn(2, 3, 9, 9)
    for config in ("auto", "exact"):
        (site,) = plan_patch(model, config, example_inputs=x).sites
        assert site.strategy == "keep"
        assert "works in place, and conv2d in second reads what its input was" in site.reason


def test_codes_where_another_op_keeps_the_input() -> None:
    network, args = built(SharedInput)
    randomise(network)
    model = Built("SharedInput", network, ExampleInputs(args), "", "", 0)
    report = plan_patch(network, "paper", example_inputs=args)
    site = next(site for site in report.sites if site.name == "act")
    assert (site.strategy, site.bytes_before) == ("keep", 0)
    assert "another op saves what it needs" in site.reason
    assert not judge(model).wrong


def test_strides_stay_and_so_do_the_random_numbers_behind() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act = nn.Conv2d(3, 8, 3), nn.LeakyReLU()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.drop(self.act(self.first(x)) + 1)
            return hidden

    torch.manual_seed(0)
    model = Dropping().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    patch_model(model, "auto", example_inputs=x)
    assert isinstance(model.act, CodesActivation)
    assert model.act(model.first(x)).is_contiguous(memory_format=torch.channels_last)
    assert_equal(step(model, x, seed=3), step(twin, x, seed=3))
