"""Activations that a forward writes as chains of elementwise functions save what enters the chain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.nn.chains import Caller, extended
from tests.support.chained import (
    BODIES,
    CHAINS,
    FORMULAS,
    FULL,
    HIDDEN,
    LINEARS,
    SAVED,
    UNPLANNED,
    chains_of,
    clamped,
    half,
    network,
    patched,
    plain,
    planned,
    saved,
    small,
    tokens,
)  # fmt: skip
from tests.support.judge import assert_same_step
from tests.support.models import randomise
from tests.support.step import AUTOCAST, BF16, cast, step, warned
from tests.support.toys import WIDTH, rows


@pytest.mark.parametrize("name", FORMULAS)
def test_bits_are_equal_and_what_enters_is_saved(name: str) -> None:
    model = network(FORMULAS[name])
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    found, expected = (step(net, rows(), seed=7) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert_same_step(model, twin, rows())
    numbers = {"xielu": 4, "wide": 0}.get(name, 0)  # a softplus
    assert saved(model) == LINEARS + SAVED[name] * FULL + numbers
    assert saved(twin) - saved(model) >= 3 * FULL


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_added_up_in_the_order_of_the_forward(name: str) -> None:
    """So that a step gives the same bits whenever it is run, and those of the unpatched model."""
    model = network(FORMULAS[name])
    twin = copy.deepcopy(model)
    patched(model)
    expected = step(twin, rows(), seed=7).gradients
    for _ in range(4):
        found = step(model, rows(), seed=7).gradients
        assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", ["xielu", "clamped"])
def test_any_use_of_the_value_is_right(name: str, body: Any) -> None:
    """Planned on the plain forward, so that each other one meets deferred tensors unforeseen."""
    model = network(FORMULAS[name])
    model[1].body = body
    twin = copy.deepcopy(model)
    model[1].body = plain
    patched(model)
    model[1].body = body
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("body", BODIES)
def test_plans_of_any_use_are_right(body: Any) -> None:
    model = network(clamped, body)
    twin = copy.deepcopy(model)
    assert bool(planned(clamped, body)) is (body not in UNPLANNED)
    if body in UNPLANNED:
        return
    patched(model)
    assert_same_step(model, twin, rows())
    assert saved(model) <= saved(twin)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
def test_low_precision(name: str, mode: Any) -> None:
    model = cast(network(FORMULAS[name]), mode.weights)
    twin = copy.deepcopy(model)
    x = rows().to(mode.weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, CHAINS, example_inputs=(x,))
    assert chains_of(model)
    found, expected = (step(net, rows(), mode, seed=7, count=True) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert found.saved < expected.saved
    assert_same_step(model, twin, rows(), mode)


def test_steps_run_under_the_autocast_of_the_forward() -> None:
    """On a GPU autocast gives some functions float32, and on a CPU none, so that one here asks for it."""
    seen: list[bool] = []

    def doubled(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return x * 2

    x = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(2, 3, requires_grad=True)
    for wanted in (True, False):
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=wanted):
            y: Any = extended(doubled, (x,), {}, Caller(moved=False), set())
        with torch.autocast("cpu", torch.bfloat16, enabled=not wanted):
            z = F.linear(y, weight)
            z.sum().backward()
        # its dtype, its layout (which is known the second time), its value, and its value again
        assert seen == [wanted] * (4 if wanted else 3)


@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
def test_every_preset_has_it(preset: str) -> None:
    model = network(clamped)
    twin = copy.deepcopy(model)
    report = patch_report(patched(model, preset))
    assert chains_of(model) == ["1.act"] and not report.approximate
    assert_same_step(model, twin, rows())


def swish(net: Any, x: Tensor) -> Tensor:
    y = half(net, x)
    return y * torch.sigmoid(1.7 * y)


def two_steps(net: Any, x: Tensor) -> Tensor:
    y = half(net, x)
    return (y + 1) * torch.tanh(net.positive * y + 0.1 * y**2)


def glu(net: Any, x: Tensor) -> Tensor:
    return x[..., HIDDEN:] * torch.sigmoid(1.7 * half(net, x))


@pytest.mark.parametrize("formula", [swish, two_steps])
@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
def test_an_activation_of_a_step_of_its_factor_is_the_chains(preset: str, formula: Any) -> None:
    """As a gated product of its own it would save the step beside what the step is made of."""
    model = network(formula)
    twin = copy.deepcopy(model)
    patched(model, preset)
    assert chains_of(model) == ["1.act"]
    assert saved(model) == LINEARS + FULL
    assert_same_step(model, twin, rows())


def test_an_activation_of_another_tensor_than_its_factor_is_none() -> None:
    """A kernel multiplies it, and a chain would save as much."""
    model = network(glu)
    twin = copy.deepcopy(model)
    report = patch_report(patched(model, "exact"))
    assert [site.name for site in report.sites if site.strategy == "recompute"] == [
        "1.act.sigmoid()"
    ]
    assert saved(model) <= LINEARS + 3 * FULL
    assert_same_step(model, twin, rows())


def test_keep_switches_it_off() -> None:
    assert planned(clamped) and not planned(clamped, config={**CHAINS, "activations": "keep"})


@pytest.mark.parametrize("frozen", ["1.down", "1.up", "0", "1.act", "1.down.weight"])
def test_whoever_trains(frozen: str) -> None:
    model = network(FORMULAS["xielu"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    assert_same_step(model, twin, rows())


def test_a_frozen_reader_saves_nothing_of_the_chain() -> None:
    model = network(clamped)
    model[1].down.requires_grad_(False)
    patched(model)
    assert saved(model) == LINEARS + 2 * FULL


def bilinear(net: Any, x: Tensor) -> Tensor:
    return x[..., :HIDDEN] * x[..., HIDDEN:]


def test_lora_reads_it() -> None:
    model = network(clamped)
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["down"], init_lora_weights=False, lora_dropout=0.0), model
    )
    model[1].up.requires_grad_(True)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    assert_same_step(model, twin, rows())
    low = len(rows()) * 2 * 4  # what lora_B reads; up trains, too
    assert saved(model) == 2 * FULL + low + LINEARS // 3


def test_a_product_without_an_activation_is_not_saved() -> None:
    """Autograd saves both factors anyway (bilinear layers)."""
    model = network(bilinear)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    assert saved(twin) - saved(model) == FULL
    assert_same_step(model, twin, rows())


def test_known_activations_and_reductions_are_left() -> None:
    """A gated product is today's; a softmax and a sum of rows end a chain."""

    def gated(net: Any, x: Tensor) -> Tensor:
        return F.silu(x[..., :HIDDEN]) * x[..., HIDDEN:]

    def reduced(net: Any, x: Tensor) -> Tensor:
        return (half(net, x) + 1).softmax(-1)

    def single(net: Any, x: Tensor) -> Tensor:
        return x[..., :HIDDEN] + x[..., HIDDEN:]

    def drawn(net: Any, x: Tensor) -> Tensor:
        return half(net, x) + torch.randn(HIDDEN)

    for formula in (gated, reduced, single, drawn):
        assert not planned(formula)


@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
def test_apertus(preset: str) -> None:
    model = randomise(transformers.ApertusForCausalLM(small()).float()).train()
    twin = copy.deepcopy(model)
    patch_model(model, preset, example_inputs=tokens())
    if preset != "paper":  # which folds weights
        assert_same_step(model, twin, tokens())
    found, expected = (step(net, tokens(), count=True).saved for net in (model, twin))
    assert patch_report(model).saved_after == found < expected


def test_real_widths_are_near_the_floor() -> None:
    """With head and loss; gpt_oss is in test_experts."""
    with torch.device("meta"):
        config = transformers.ApertusConfig(num_hidden_layers=2, use_cache=False)
        model = transformers.ApertusForCausalLM(config).bfloat16()
    ids = torch.zeros(1, 1024, dtype=torch.long)
    report = plan_patch(model, "exact", example_inputs={"input_ids": ids, "labels": ids})
    assert 1.0 < report.above_floor <= 1.005


def test_a_comparison_that_python_mirrors() -> None:
    """``tensor > deferred`` calls ``deferred < tensor``."""

    def above(net: Any, x: Tensor) -> Tensor:
        y = half(net, x)
        z = y * torch.exp(-y.abs())
        return torch.where(net.beta > z, z * y, z + net.positive) * torch.where(y >= z, z, 0.5)

    model = network(above)
    twin = copy.deepcopy(model)
    report = patch_report(patched(model))
    assert saved(model) == report.saved_after == LINEARS + FULL < saved(twin)
    assert_same_step(model, twin, rows())


def test_a_cast_to_the_dtype_of_a_tensor_of_any_shape_is_no_step() -> None:
    """Granite MoE casts a softmax of 2 columns to the dtype of its input, with ``type_as``."""

    def routed(net: Any, x: Tensor) -> Tensor:
        weights = torch.softmax(x[:, :2].float(), -1).type_as(x)
        return clamped(net, x.float().to(weights)) * weights.sum(-1, keepdim=True)

    model = network(routed).to(torch.bfloat16)
    twin, x = copy.deepcopy(model), rows().to(torch.bfloat16)
    patch_model(model, CHAINS, example_inputs=(x,))
    assert_same_step(model, twin, x, BF16)


class Doubled(torch.nn.Module):
    """Multiplies by a number, of which autograd saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1)


class Mixed(torch.nn.Module):
    """A chain, and a child that calls one of its functions, of ``times`` as many elements."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.last, self.child = (
            torch.nn.Linear(16, 32),
            torch.nn.Linear(32, 32),
            Doubled(),
        )
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        gate = self.first(x)
        hidden = self.last(gate * torch.sigmoid(gate * 1.7) * (gate + 1))
        y: Tensor = self.child(torch.cat([hidden] * self.times, -1))
        return y


@pytest.mark.parametrize("times", [1, 16])
def test_functions_of_a_child_that_are_called_alike_count(times: int) -> None:
    """They wait as those of the chain do, and save what enters them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Mixed(times))
    twin = copy.deepcopy(model)
    with warned():  # of the larger one nothing is patched
        patched(model)
    assert (saved(model) < saved(twin)) == (times == 1)
    assert saved(model) <= saved(twin)
    assert_same_step(model, twin, rows())


class Narrow(nn.Module):
    """A chain that saves little beside wide Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.up, self.down = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.wide(x) + self.down(y * torch.sigmoid(1.7 * y))


@pytest.mark.parametrize("blocks", [2, 60])
def test_a_deep_model_is_patched_as_a_shallow_one(blocks: int) -> None:
    model = patched(nn.Sequential(*(Narrow() for _ in range(blocks))), "exact")
    assert len(chains_of(model)) == blocks
