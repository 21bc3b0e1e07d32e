"""torch's selective checkpoint, whatever its policy saves: its second run has the operators of the first."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowmem_patch import patch_model
from tests.support.judge import assert_rounded, assert_same_step
from tests.support.models import EVERY_FAMILY, FAMILIES, build, randomise
from tests.support.step import DOUBLE, step
from tests.support.toys import WIDTH, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def save_products(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    products = any(word in str(op) for word in ("mm", "lowmem_patch"))
    return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE


def always(policy: CheckpointPolicy) -> Any:
    return lambda *_, **__: policy


POLICIES = {
    "all saved": always(CheckpointPolicy.MUST_SAVE),
    "all preferred": always(CheckpointPolicy.PREFER_SAVE),
    "products": save_products,
    "nothing": always(CheckpointPolicy.MUST_RECOMPUTE),
}


def checkpointed(model: Any, policy: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    model.train().gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return model


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradients_are_those_of_the_unpatched(name: str, policy: str, adapted: bool) -> None:
    family = FAMILIES[name]
    model = build(family)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=family.linears))
    model = randomise(model)
    twin = copy.deepcopy(model)
    inputs = family.inputs()
    step(checkpointed(copy.deepcopy(twin), POLICIES[policy]), inputs)
    patch_model(model, "exact", example_inputs=inputs)
    assert_same_step(checkpointed(model, POLICIES[policy]), twin.train(), inputs)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_first_step_after_a_cast(name: str) -> None:
    """The norms look at their gammas anew, in the middle of a block: no op of the block's."""
    family = EVERY_FAMILY[name]
    model = get_peft_model(build(family), LoraConfig(r=4, target_modules=family.linears))
    twin = copy.deepcopy(randomise(model)).double()
    inputs = family.inputs()
    patch_model(model, "exact", example_inputs=inputs)
    checkpointed(model, POLICIES["all saved"]).double()
    for _ in range(2):
        assert_rounded(step(model, inputs, DOUBLE), step(twin.train(), inputs, DOUBLE))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight + 0.1


class Looped(nn.Module):
    """Calls a norm behind an activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, WIDTH), nn.SELU()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.pooled, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(2):
            y = self.norm(self.act(self.up(y)))
        pooled = torch.sigmoid(self.pooled(x.mean(1, keepdim=True)))
        result: Tensor = x * pooled + self.down(1.0 - y)
        return result


class Checkpointed(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        aten = torch.ops.aten
        products = [aten.mm.default, aten.addmm.default, aten.bmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        y: Tensor = checkpoint(self.inside, x, use_reentrant=False, context_fn=contexts)
        return y


def test_a_gamma_that_is_computed_at_each_look() -> None:
    """A parametrized gamma is another tensor in a block's second run, which saves what the first did."""
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(WIDTH, WIDTH), Looped(), nn.Linear(WIDTH, WIDTH))
    x = rows().view(2, -1, WIDTH)
    model = patch_model(copy.deepcopy(twin), "exact", example_inputs=(x,))
    for one in (model, twin):
        parametrize.register_parametrization(one[1].norm, "weight", Halved())
    assert_same_step(Checkpointed(model), Checkpointed(twin), x)
