"""What is said of example inputs that are none, or not those of the forward."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

from lowmem_patch import TraceError, plan_patch

IMAGES, LABELS = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)


@pytest.fixture(scope="module")
def images_model() -> Any:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)


def said_of(model: Any, inputs: Any) -> str:
    with pytest.raises(TraceError) as caught:
        plan_patch(model, example_inputs=inputs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            [IMAGES, LABELS],
            "This is a list: a DataLoader gives images and labels in one. Give what",
        ),
        ((IMAGES, LABELS), "forward takes (x, attn_mask, is_causal); are labels among the inputs?"),
        ({"pixel_values": IMAGES}, "its forward takes (x, attn_mask, is_causal)"),
        ((None,), "(no tensors)"),
        ({"x": IMAGES.numpy()}, "example_inputs['x'] is a numpy array: make a tensor of it by"),
    ],
)
def test_a_batch_that_a_model_does_not_take_is_told_what_to_give(
    images_model: Any, inputs: Any, said: str
) -> None:
    assert said in said_of(images_model, inputs)


def test_long_signatures_are_cut(make: Any) -> None:
    text = said_of(make("llama"), {"tokens": torch.ones(2, 8).long()})
    assert (
        "its forward takes (input_ids, attention_mask, position_ids, " in text and ", ...)" in text
    )


def test_an_error_of_the_model_itself_names_no_arguments() -> None:
    class Failing(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of order")

    text = said_of(torch.nn.Sequential(Failing(4, 4)), torch.ones(2, 4))
    assert text.endswith("out of order")


def test_a_list_of_arrays_is_no_list_of_tensors(images_model: Any) -> None:
    assert "This is a list: give a batch" in said_of(images_model, [np.zeros(3)])


def test_a_head_that_trains_alone_is_told_that_nothing_is_saved(images_model: Any) -> None:
    model = copy.deepcopy(images_model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    said = "the patch saves no memory for such inputs: no gradient passes through the patched sites"
    assert said in " ".join(str(plan_patch(model, example_inputs=IMAGES)).split())
    model.requires_grad_(True)
    assert "saves no memory" not in str(plan_patch(model, example_inputs=IMAGES))
