"""The floor is never above what is saved, whoever trains: it says what no patch can save less than."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowmem_patch import plan_patch
from tests.support.models import FAMILIES, MORE_FAMILIES, build

KNOWN = {**FAMILIES, **MORE_FAMILIES}

WHO_TRAINS: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "biases": lambda name: name.endswith("bias"),
    "norms": lambda name: "norm" in name.lower() or "ln_" in name,
    "weights": lambda name: name.endswith("weight"),
}


@pytest.mark.parametrize("who", WHO_TRAINS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "swin", "timm-vit"])
def test_nothing_falls_below_the_floor(name: str, who: str) -> None:
    model = build(KNOWN[name]).to("meta").train()
    for parameter, value in model.named_parameters():
        value.requires_grad_(WHO_TRAINS[who](parameter))
    inputs = KNOWN[name].inputs()
    for preset, autocast in (("exact", False), ("auto", True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            report = plan_patch(model, preset, example_inputs=inputs)
        assert report.floor <= report.saved_after <= report.saved_before
        assert sum(report.floor_blocks.values()) == report.floor
