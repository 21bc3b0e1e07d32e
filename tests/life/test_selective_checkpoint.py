"""torch's selective checkpoint, whatever its policy saves: its second run has the operators of the first."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from lowmem_patch import patch_model
from tests.support.judge import assert_rounded, assert_same_step
from tests.support.models import EVERY_FAMILY, FAMILIES, build, randomise
from tests.support.step import DOUBLE, step

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
