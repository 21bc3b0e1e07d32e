"""Example inputs of timm models: of the size that the model was made for."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from lowmem_patch.tracing.example_inputs import make_example_inputs

OLD_TIMM = timm.__version__ in ("1.0.29", "1.0.30")


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64, "in_chans": 2}, (2, 2, 64, 64)),
        ("swin_tiny_patch4_window7_224", {"img_size": 112}, (2, 3, 112, 112)),
        # known to the model itself since timm 1.0.31
        pytest.param(
            "coatnet_pico_rw_224",
            {"img_size": 64},
            (2, 3, 64, 64),
            marks=pytest.mark.skipif(OLD_TIMM, reason="needs timm 1.0.31"),
        ),
        ("coat_lite_tiny", {"img_size": 64}, (2, 3, 64, 64)),  # to the first of four embeddings
        ("efficientnet_b0", {"in_chans": 1}, (2, 1, 224, 224)),
        ("volo_d1_224", {}, (2, 3, 224, 224)),  # whose embedding begins with convolutions
        ("tresnet_m", {}, (2, 3, 224, 224)),  # which puts pixels in depth before its first one
    ],
)
def test_the_size_is_the_models_own(
    name: str, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **settings)
    (x,) = make_example_inputs(model).args
    assert x.shape == shape
