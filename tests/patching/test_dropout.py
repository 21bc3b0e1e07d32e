"""Dropout in front of a Linear: the unpatched model's numbers, and one bit kept for each element."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from tests.patching.families import FAMILIES, Inputs
from tests.patching.helpers import build, cast, in_mode, MODES, tensors_of

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
# norms are kept, since sharing recovers their input up to rounding
ALONE = {"norms": "keep", "activations": "recompute", "linear_inputs": "one_copy"}
P = 0.1


def lora(name: str, **options: Any) -> Any:
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = {"r": 2, "target_modules": family.linears, "lora_dropout": P}
    config |= {"init_lora_weights": False}
    dtype = options.pop("dtype", torch.float32)
    return get_peft_model(cast(build(family), dtype), LoraConfig(**{**config, **options})).train()


def step(model: Any, inputs: Inputs, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = tensors_of(model(**inputs))[0]
    output.float().square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def assert_equal_steps(model: Any, twin: Any, inputs: Inputs, autocast: bool = False) -> None:
    """Every bit."""
    found, ours = step(model, inputs, autocast)
    expected, theirs = step(twin, inputs, autocast)
    assert torch.equal(found, expected)
    assert set(ours) == set(theirs) and theirs
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert", "phi3"])
@pytest.mark.parametrize("mode_name", ["fp32", "bf16", "autocast"])
def test_bits(name: str, mode_name: str) -> None:
    mode = MODES[mode_name]
    model, inputs = lora(name, dtype=mode.weights), in_mode(FAMILIES[name].inputs(), mode)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode_name == "autocast"):
        patch_model(model, ALONE, example_inputs=inputs)
    assert_equal_steps(model, twin, inputs, mode_name == "autocast")
