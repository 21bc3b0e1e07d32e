"""Models that share modules or weights with a patched one, and parameters given from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.errors import PatchError
from lowmem_patch.strategies.swap import is_replacement
from tests.support.configs import FOLD, SHARE
from tests.support.judge import (
    WEIGHTS_TOLERANCE,
    assert_rounded,
    assert_same_function,
    assert_same_weights,
)
from tests.support.models import randomise
from tests.support.step import DOUBLE, Step, step, trained
from tests.support.toys import Outer, Toy, batch, gated, mlp

Change = Callable[[Any, Any], None]
CONFIGS = {"auto": {"norms": "auto", "activations": "recompute"}, "exact": "exact", "fold": FOLD}
ALL = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def share_norm(one: Any, two: Any) -> None:
    two.norm = one.norm


def share_linear(one: Any, two: Any) -> None:
    two.up = one.up


def share_weight(one: Any, two: Any) -> None:
    two.norm.weight = one.norm.weight


def share_all(one: Any, two: Any) -> None:
    two.norm, two.up, two.act, two.down = one.norm, one.up, one.act, one.down


def assert_same_steps(models: Any, twins: Any) -> None:
    for model, twin in zip(models, twins, strict=True):
        assert_same_function(model, twin, batch())


def pair(share: Change) -> tuple[Any, Any]:
    one, two = randomise(Toy(mlp)).double(), randomise(Toy(mlp), seed=2).double()
    share(one, two)
    return one, two


@ALL
@pytest.mark.parametrize("share", [share_norm, share_linear, share_weight, share_all])
def test_model_that_shares_with_a_patched_one_is_right(share: Change, config: Any) -> None:
    one, two = pair(share)
    twins = copy.deepcopy((one, two))
    patch_model(one, config, example_inputs=batch().double())
    site = next(s for s in patch_report(one).sites if s.name == "norm")
    assert site.strategy == "share"
    if config is FOLD:
        assert "outside the model" in site.reason
    assert_same_steps((one, two), twins)
    unpatch_model(one)
    assert_same_steps((one, two), twins)


@pytest.mark.parametrize("share", [share_norm, share_linear, share_weight, share_all])
def test_both_models_that_share_can_be_patched(share: Change) -> None:
    one, two = pair(share)
    twins = copy.deepcopy((one, two))
    for model in (one, two):
        patch_model(model, SHARE, example_inputs=batch().double())
    assert_same_steps((one, two), twins)
    unpatch_model(one)
    assert_same_steps((one, two), twins)
    unpatch_model(two)
    assert_same_steps((one, two), twins)
    assert not any(is_replacement(module) for model in (one, two) for module in model.modules())


def test_patched_block_in_another_model_is_refused_by_name() -> None:
    block = randomise(Toy(gated)).double()
    one, two = Outer(block), Outer(block)
    one.double(), two.double()
    twins = copy.deepcopy((one, two))
    patch_model(one, SHARE, example_inputs=batch().double())
    assert_same_steps((one, two), twins)
    with pytest.raises(PatchError, match="shares modules with one"):
        patch_model(two, SHARE, example_inputs=batch().double())
    unpatch_model(one)
    patch_model(two, SHARE, example_inputs=batch().double())
    assert_same_steps((one, two), twins)


@pytest.mark.parametrize("config", ["exact", CONFIGS["auto"]], ids=["exact", "auto"])
def test_functional_call_uses_the_given_parameters(config: Any) -> None:
    net = randomise(Toy(gated)).double()
    twin = copy.deepcopy(net)
    patch_model(net, config, example_inputs=batch().double())
    other = dict(randomise(Toy(gated), seed=9).double().named_parameters())
    found = []
    for model in (net, twin):
        given = {n: p.detach().clone().requires_grad_() for n, p in other.items()}
        y = functional_call(model, given, (batch().double(),))
        y.square().sum().backward()
        gradients = {name: p.grad for name, p in given.items() if p.grad is not None}
        found.append(Step([y.detach()], gradients))
    assert_rounded(*found)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("config", ["exact", CONFIGS["auto"]], ids=["exact", "auto"])
def test_swa_average_follows_a_patched_model(config: Any, made: str) -> None:
    from torch.optim.swa_utils import AveragedModel

    averages = []
    for patched in (True, False):
        torch.manual_seed(0)
        net = randomise(Toy(gated)).double()
        average = AveragedModel(net) if made == "before" else None
        if patched:
            patch_model(net, config, example_inputs=batch().double())
        average = average or AveragedModel(net)
        trained(net, batch().double(), 5, average.update_parameters)
        averages.append(average)
    assert_same_weights(*averages)
    assert_rounded(*(step(average, batch(), DOUBLE) for average in averages), WEIGHTS_TOLERANCE)


@pytest.mark.parametrize("config", ["exact", CONFIGS["auto"]], ids=["exact", "auto"])
def test_hand_written_ema_follows_a_patched_model(config: Any) -> None:
    averages = []
    for patched in (True, False):
        torch.manual_seed(0)
        net = randomise(Toy(gated)).double()
        ema = copy.deepcopy(net)  # stock, made before the patch
        if patched:
            patch_model(net, config, example_inputs=batch().double())

        def follow(model: Any, ema: Any = ema) -> None:
            with torch.no_grad():
                for mean, value in zip(ema.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)

        trained(net, batch().double(), 5, follow)
        averages.append(ema)
    assert_same_weights(*averages)
    assert_rounded(*(step(average, batch(), DOUBLE) for average in averages), WEIGHTS_TOLERANCE)
