"""Example inputs for the UNets and transformers of diffusers, from their configs.

The arguments of a forward have the same names throughout the library, and the config gives their widths. The
layout of the latents (an image, its tokens, a video) is a choice: each is a candidate.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.tracing.inputs import ExampleInputs

_SIDE = 16  # of the latents, where the config has none: an image of 128 or 256 pixels
_TOKENS = 77  # of a prompt, as CLIP reads it
_FRAMES = 5  # of the latents of a video
_STEPS = 1000
_TIME_IDS = 6  # original size, crop and target size of SDXL, each two numbers
# widths of the prompt's embedding, the first that a config has
_PROMPT_WIDTHS = (
    "caption_channels", "text_embed_dim", "text_dim", "joint_attention_dim", "encoder_hid_dim",
    "cross_attention_dim",
)  # fmt: skip
# beside which the positions of their tokens are told
_POSITIONS = ("img_ids", "img_shapes", "num_frames")


def is_diffusers(model: Any) -> bool:
    """Whether the model has a config as diffusers writes it."""
    return hasattr(model, "register_to_config") and isinstance(getattr(model, "config", None), dict)


def diffusion_inputs(
    model: Any, batch_size: int, tokens: int | None, device: torch.device | str, dtype: torch.dtype
) -> Iterator[ExampleInputs]:
    """Candidates for one forward, with so many tokens of the prompt (default 77); none where an argument is
    required that is not known here."""
    maker = _Maker(model.config, batch_size, device, dtype)
    parameters = inspect.signature(model.forward).parameters
    latents, plane = maker.latents(parameters)
    options = maker.options(parameters, tokens or _TOKENS, *plane)
    values: dict[str, list[Any]] = {}
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty
        if name in ("hidden_states", "sample"):
            values[name] = latents
        elif options.get(name) and (required or not name.endswith("_mask")):
            values[name] = options[name]
        elif required:
            return  # and unknown
    for chosen in itertools.product(*values.values()):
        yield ExampleInputs((), dict(zip(values, chosen, strict=True)))


class _Maker:
    """Makes tensors of the sizes that a config gives."""

    def __init__(
        self, config: dict[str, Any], batch: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.config, self.batch, self.device, self.dtype = config, batch, device, dtype

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, device=self.device, dtype=self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.ones(self.batch, *shape, device=self.device, dtype=dtype)

    def numbers(self, below: int) -> Tensor:
        return torch.randint(0, below, (self.batch,), device=self.device)

    def latents(self, accepted: Container[str]) -> tuple[list[Tensor], tuple[int, int]]:
        """An image or a video, tokens where their positions are told beside them; with height and width."""
        get = self.config.get
        channels = get("in_channels") or 4
        if any(name in accepted for name in _POSITIONS):
            return [self.noise(_SIDE * _SIDE, channels)], (_SIDE, _SIDE)
        size = get("sample_size")
        sides = [size, size] if isinstance(size, int) else list(size or [_SIDE, _SIDE])
        plane = int(get("sample_height") or sides[0]), int(get("sample_width") or sides[-1])
        frames, ratio = get("sample_frames"), get("temporal_compression_ratio")
        frames = (frames - 1) // ratio + 1 if frames and ratio else _FRAMES
        shapes = (channels, *plane), (channels, frames, *plane), (frames, channels, *plane)
        return [self.noise(*shape) for shape in shapes], plane

    def options(
        self, accepted: Container[str], tokens: int, height: int, width: int
    ) -> dict[str, list[Any]]:
        """What each other argument may be; nothing where it is left out."""
        get = self.config.get
        tokens = get("max_text_seq_length") or tokens
        found: dict[str, list[Any]] = {
            "timestep": [self.numbers(_STEPS)],
            "img_ids": self.positions(height * width),
            "txt_ids": self.positions(tokens),
            "img_shapes": [[[(1, height, width)]] * self.batch],
            "num_frames": [1],
            "height": [height],
            "width": [width],
        }
        prompt = next((get(name) for name in _PROMPT_WIDTHS if get(name)), None)
        if prompt is not None:
            wide = prompt if isinstance(prompt, int) else prompt[0]
            found["encoder_hidden_states"] = [self.noise(tokens, wide)]
            found["encoder_attention_mask"] = [self.ones(tokens, dtype=torch.long)]
        if pooled := get("pooled_projection_dim"):
            found["pooled_projections"] = [self.noise(pooled)]
        if get("guidance_embeds"):
            found["guidance"] = [self.ones()]
        if "class_labels" in accepted:
            found["class_labels"] = self.class_labels()
        if "added_cond_kwargs" in accepted:
            found["added_cond_kwargs"] = self.added_cond_kwargs()
        return found

    def positions(self, count: int) -> list[Any]:
        """Positions for rotary embeddings, for all rows at once or for each."""
        axes = len(self.config.get("axes_dims_rope") or (0, 0, 0))
        joint = torch.zeros(count, axes, device=self.device)
        return [joint, joint.expand(self.batch, count, axes)]

    def class_labels(self) -> list[Any]:
        if self.config.get("norm_type") == "ada_norm_zero":
            return [self.numbers(self.config["num_embeds_ada_norm"])]
        if self.config.get("class_embed_type") == "projection":
            return [self.noise(self.config["projection_class_embeddings_input_dim"])]
        count = self.config.get("num_class_embeds")
        return [self.numbers(count)] if count else []

    def added_cond_kwargs(self) -> list[Any]:
        """What SDXL takes, a pooled prompt and sizes, or what PixArt takes, sizes or none."""
        if self.config.get("addition_embed_type") == "text_time":
            times = _TIME_IDS * self.config["addition_time_embed_dim"]
            pooled = self.config["projection_class_embeddings_input_dim"] - times
            return [{"text_embeds": self.noise(pooled), "time_ids": self.ones(_TIME_IDS)}]
        if self.config.get("norm_type") != "ada_norm_single":
            return []
        shapes = {"resolution": self.noise(2), "aspect_ratio": self.noise(1)}
        return [dict.fromkeys(shapes), shapes]
