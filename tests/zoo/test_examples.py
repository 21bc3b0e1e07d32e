"""Inputs made from configs alone, for models that read images, sound or several senses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowmem_patch import plan_patch
from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.example_inputs import make_example_inputs
from tests.support.versions import before
from zoo.build import build_transformers
from zoo.heads import head_class_of


def made(model_type: str) -> dict[str, tuple[int, ...]]:
    model = build_transformers(model_type).model
    inputs = make_example_inputs(model)
    plan_patch(model)
    return {name: tuple(value.shape) for name, value in inputs.kwargs.items()}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {"input_ids": (2, 16)}),
        ("t5", {"input_ids": (2, 16), "decoder_input_ids": (2, 16)}),
        ("clip", {"input_ids": (2, 16), "pixel_values": (2, 3, 32, 32)}),  # neither tower alone
        ("llava", {"input_ids": (2, 16)}),  # text alone will do
        ("videomae", {"pixel_values": (2, 16, 3, 32, 32)}),
        ("wav2vec2", {"input_values": (2, 6400)}),
        ("audio-spectrogram-transformer", {"input_values": (2, 1024, 128)}),
        ("whisper", {"input_features": (2, 80, 3000), "decoder_input_ids": (2, 16)}),
        ("vitpose", {"pixel_values": (2, 3, 32, 24)}),  # its backbone's size
        # its encoder and its decoder read vocabularies of their own, the decoder four codebooks
        pytest.param(
            "musicgen",
            {"input_ids": (2, 16), "decoder_input_ids": (8, 16)},
            marks=pytest.mark.skipif(
                before("transformers", "5.7"), reason="transformers 5.6 makes no config of it"
            ),
        ),
        ("speech_to_text", {"input_features": (2, 128, 80), "decoder_input_ids": (2, 16)}),
    ],
)
def test_inputs_from_the_config(model_type: str, expected: dict[str, tuple[int, ...]]) -> None:
    assert made(model_type) == expected


def test_special_tokens_are_not_drawn() -> None:
    built = build_transformers("llama")
    built.model.config.pad_token_id = 5
    for length in (64, 256):
        tokens = make_example_inputs(built.model, sequence_length=length).kwargs["input_ids"]
        assert not bool((tokens == 5).any())


class Odd(torch.nn.Module):
    main_input_name = "image_tokens_of_a_kind"

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = torch.nn.Module()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, image_tokens_of_a_kind: torch.Tensor) -> torch.Tensor:
        return self.norm(image_tokens_of_a_kind)


def test_unknown_input_is_named() -> None:
    with pytest.raises(TraceError, match="image_tokens_of_a_kind"):
        make_example_inputs(Odd())


def test_a_class_of_the_text_alone_gets_the_config_of_the_text() -> None:
    """As AutoModelForCausalLM gives it: Llama4Config itself has no pad_token_id."""
    model = build_transformers("llama4", head_class_of).model
    assert type(model).__name__ == "Llama4ForCausalLM"
    assert type(model.config).__name__ == "Llama4TextConfig"
