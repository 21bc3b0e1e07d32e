"""Linears whose class, or the forward of their class, is another one since the patch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from tests.support.heads import IDS, llama
from tests.support.judge import assert_close, assert_rounded
from tests.support.step import DOUBLE, StayInFloat64, step
from tests.support.toys import WIDTH, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

BATCH = {"input_ids": IDS, "labels": IDS}


def doubled(linear: Any, x: Tensor) -> Tensor:
    return F.linear(x, 2.0 * linear.weight, linear.bias)


class Doubled(nn.Linear):
    forward = doubled


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()


def assert_same_training(model: Any, twin: Any) -> None:
    with StayInFloat64():  # as transformers' norms do not
        for one in (model, twin):
            one.zero_grad()
            one(**BATCH).loss.backward()
    with StayInFloat64(), torch.no_grad():
        assert_close(model(**BATCH).loss, twin(**BATCH).loss, "loss")
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    assert gradients
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert_close(parameter.grad, gradients[name], name)


@pytest.mark.parametrize("place", ["lm_head", "model.layers.0.mlp.down_proj"])
def test_another_class_of_a_linear_is_run(place: str) -> None:
    twin = llama().double()
    model = patch_model(copy.deepcopy(twin), "exact")
    for one in (model, twin):
        one.get_submodule(place).__class__ = Doubled
    assert_same_training(model, twin)
    said = "lm_head: logits are computed at once, since its class has another forward"
    assert (said in str(patch_report(model))) is (place == "lm_head")


@pytest.mark.parametrize("adapt", [None, lora], ids=["full", "lora"])
@pytest.mark.parametrize("preset", ["exact", "auto"])
def test_another_forward_of_all_linears_is_run(
    preset: str, adapt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = llama() if adapt is None else adapt(llama())
    twin = twin.double()
    model = patch_model(copy.deepcopy(twin), preset)
    monkeypatch.setattr(nn.Linear, "forward", doubled)
    assert_same_training(model, twin)


def test_another_forward_is_run_where_inputs_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 bits gradients are approximate, and the forward is not."""
    original = llama().bfloat16()
    exact, compact = (patch_model(copy.deepcopy(original), p) for p in ("exact", "compact"))
    before = compact(**BATCH).loss
    monkeypatch.setattr(nn.Linear, "forward", doubled)
    found = compact(**BATCH).loss
    assert torch.equal(found, exact(**BATCH).loss)
    assert not torch.equal(found, before)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.linear(self.norm(x)) * self.scale
        return result


def test_another_forward_is_run_in_front_of_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH)).double()
    x = rows().double()
    model = patch_model(copy.deepcopy(twin), "exact", example_inputs=(x,))
    monkeypatch.setattr(nn.Linear, "forward", doubled)
    assert_rounded(step(model, x, DOUBLE), step(twin, x, DOUBLE))
