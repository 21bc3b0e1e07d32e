"""Dropout between an activation and its Linear: the activation is recomputed, the mask kept in bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from timm.layers import GluMlp, Mlp
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.configs import RECOMPUTE
from tests.support.judge import assert_equal_steps, assert_same_step
from tests.support.models import FAMILIES, build
from tests.support.step import step
from tests.support.toys import ROWS, WIDTH, Around, rows

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
P = 0.1


def patched_pair(inner: nn.Module, **config: Any) -> tuple[Any, Any]:
    model = Around(inner).train()
    twin = copy.deepcopy(model)
    return patch_model(model, {**RECOMPUTE, **config}, example_inputs=rows()), twin


HIDDEN, BITS = ROWS * 32 * 4, ROWS * 32 // 8
# the mask of a dropout before anything else, which is as wide as its tensor on the CPU
SECOND = ROWS * WIDTH * 4 - ROWS * WIDTH // 8


# tanh saves its output, which is not what the Linear saves here
@pytest.mark.parametrize("layer", [nn.GELU, nn.SiLU, nn.Tanh])
def test_an_activation_behind_a_dropout_is_recomputed(layer: type[nn.Module]) -> None:
    model, twin = patched_pair(Mlp(WIDTH, 32, act_layer=layer, drop=P))
    (site,) = patch_report(model).patched
    assert site.strategy == "recompute" and "weight gradient of inner.fc2" in site.reason
    # what was dropped and the mask as floats, for bits
    assert assert_equal_steps(model, twin, rows()) == 2 * HIDDEN - BITS + SECOND
    report = patch_report(model)
    assert report.saved_before - report.saved_after == 2 * HIDDEN - BITS + SECOND
    model.eval(), twin.eval()
    assert assert_equal_steps(model, twin, rows()) == (0 if layer is nn.Tanh else HIDDEN)


def test_a_relu_behind_a_dropout_keeps_one_bit() -> None:
    """Exact, and less to do than to compute it again; the Linear saves what was dropped."""
    model, twin = patched_pair(Mlp(WIDTH, 32, act_layer=nn.ReLU, drop=P))
    (site,) = patch_report(model).patched
    assert site.strategy == "codes" and not site.approximate
    # the output and the mask as floats, for bits of both
    assert assert_equal_steps(model, twin, rows()) == 2 * HIDDEN - 2 * BITS + SECOND
    model.eval(), twin.eval()
    assert (
        assert_equal_steps(model, twin, rows()) == -BITS
    )  # the Linear would have saved the output


def test_a_gated_product_behind_a_dropout_is_recomputed() -> None:
    model, twin = patched_pair(GluMlp(WIDTH, 64, act_layer=nn.SiLU, drop=P))
    (site,) = patch_report(model).patched
    assert site.reason == "gate and up kept, their product recomputed"
    # act(gate), what was dropped and the mask as floats, for bits
    assert assert_equal_steps(model, twin, rows()) == 3 * HIDDEN - BITS + SECOND


@pytest.mark.parametrize("lora_dropout", [0.0, 0.2])
def test_adapters_behind_an_activation_and_a_dropout(lora_dropout: float) -> None:
    config = LoraConfig(
        r=2, target_modules=["fc1", "fc2"], lora_dropout=lora_dropout, init_lora_weights=False
    )
    model = get_peft_model(Around(Mlp(WIDTH, 32, drop=P)), config).train()
    twin = copy.deepcopy(model)
    patch_model(model, RECOMPUTE, example_inputs=rows())
    with saved_bytes(model) as saved:
        model(rows())
    assert saved.activations == patch_report(model).saved_after
    assert_same_step(model, twin, rows())
    report = patch_report(model)
    before, after = (step(one, rows(), count=True).saved for one in (twin, model))
    assert before - after == report.saved_before - report.saved_after > 0


class Branches(nn.Module):
    """A dropout's result that another reader than a Linear wants."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.act, self.drop = nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(P)
        self.fc2, self.read = nn.Linear(32, WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.read(self.drop(self.act(self.fc1(x)))))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda x: x + 1, "nothing to gain: its output is read by a dropout (p=0.1) in inner.drop"),
        (Doubled.apply, "nothing to gain: its output is read by mul in inner (custom, "),
    ],
)
def test_other_readers_behind_a_dropout_are_the_reason(
    read: Callable[[Tensor], Tensor], reason: str
) -> None:
    model, twin = patched_pair(Branches(read))
    (site,) = patch_report(model).sites
    assert site.strategy == "keep" and site.reason.startswith(reason)
    assert assert_equal_steps(model, twin, rows()) == HIDDEN - BITS  # the mask alone


def test_t5_keeps_bits_before_wo() -> None:
    """Gated, with dropouts everywhere."""
    family = FAMILIES["t5"]
    model = build(family).train()
    twin = copy.deepcopy(model)
    patch_model(model, RECOMPUTE, example_inputs=family.inputs())
    sites = [s for s in patch_report(model).patched if s.name.endswith("act")]
    assert sites and all("their product recomputed" in site.reason for site in sites)
    assert_same_step(model, twin, family.inputs())
