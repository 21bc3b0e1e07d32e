"""Models that people write from scratch are at the floor, and models of a library that call functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.judge import assert_same_step
from tests.support.own_models import BLOCKS, Decoder, tokens
from tests.support.step import AUTOCAST, BF16, FP32, Mode, cast
from zoo.build import build_transformers
from zoo.heads import head_class_of


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_a_decoder_is_at_its_floor_and_right(name: str, mode: Mode) -> None:
    torch.manual_seed(0)
    model: Any = cast(Decoder(BLOCKS[name]), mode.weights)
    twin, inputs = copy.deepcopy(model), (tokens(), tokens())
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        report = patch_report(patch_model(model, "exact", example_inputs=inputs))
        with saved_bytes(model) as saved:
            model.train()(*inputs)
    assert saved.activations == report.saved_after
    assert report.above_floor <= 1.02, str(report)
    assert_same_step(model.eval(), twin.eval(), inputs, mode)


@pytest.mark.parametrize("name", ["lfm2", "olmo", "falcon"])
def test_models_that_call_functions_are_near_their_floor(name: str) -> None:
    built = build_transformers(name, head_class_of)
    model = patch_model(built.model.train(), "exact", example_inputs=built.inputs)
    assert patch_report(model).above_floor <= 1.02
