"""Example inputs for the UNets and transformers of diffusers, from their configs.

The arguments of a forward have the same names throughout the library, and the config gives their widths. The
layout of the latents (an image, its tokens, a video) is a choice: each is a candidate.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
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
_LATENTS = ("hidden_states", "sample")


def is_diffusers(model: Any) -> bool:
    """Whether the model has a config as diffusers writes it."""
    return hasattr(model, "register_to_config") and isinstance(getattr(model, "config", None), dict)


def diffusion_inputs(
    model: Any, batch_size: int, tokens: int | None, device: torch.device | str, dtype: torch.dtype
) -> Iterator[ExampleInputs]:
    """Candidates for one forward; none where an argument is required that is not known here.

    Args:
        tokens: of the prompt (default 77).
    """
    maker = _Maker(model.config, batch_size, tokens or _TOKENS, device, dtype)
    parameters = inspect.signature(model.forward).parameters
    for latents in maker.latents(parameters):
        values: dict[str, list[Any]] = {}
        for name, parameter in parameters.items():
            required = parameter.default is inspect.Parameter.empty
            options = [latents] if name in _LATENTS else maker.options(name, required)
            if options:
                values[name] = options
            elif required:
                return  # and unknown
        for chosen in itertools.product(*values.values()):
            yield ExampleInputs((), dict(zip(values, chosen, strict=True)))


@dataclasses.dataclass
class _Maker:
    """Knows the sizes of a model's arguments; by their names they are in `_ARGUMENTS`."""

    config: dict[str, Any]
    batch: int
    tokens: int
    device: torch.device | str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.tokens = self.config.get("max_text_seq_length") or self.tokens
        size = self.config.get("sample_size")
        sides = [size, size] if isinstance(size, int) else list(size or [_SIDE, _SIDE])
        self.height = int(self.config.get("sample_height") or sides[0])
        self.width = int(self.config.get("sample_width") or sides[-1])
        frames = self.config.get("sample_frames")
        ratio = self.config.get("temporal_compression_ratio")
        self.frames = (frames - 1) // ratio + 1 if frames and ratio else _FRAMES

    def options(self, name: str, required: bool) -> list[Any]:
        """What an argument may be; nothing where it is left out, as a mask is where it may."""
        if name not in _ARGUMENTS or (name.endswith("_mask") and not required):
            return []
        return _ARGUMENTS[name](self)

    def latents(self, accepted: Any) -> list[Tensor]:
        """An image or a video; tokens where their positions are told beside them."""
        channels = self.config.get("in_channels") or 4
        if any(name in accepted for name in ("img_ids", "img_shapes", "num_frames")):
            self.height = self.width = _SIDE
            return [self.noise(self.batch, _SIDE * _SIDE, channels)]
        plane = (self.height, self.width)
        return [
            self.noise(self.batch, channels, *plane),
            self.noise(self.batch, channels, self.frames, *plane),
            self.noise(self.batch, self.frames, channels, *plane),
        ]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def numbers(self, below: int) -> Tensor:
        return torch.randint(0, below, (self.batch,), device=self.device)

    def encoder_hidden_states(self) -> list[Any]:
        width = next((self.config[k] for k in _PROMPT_WIDTHS if self.config.get(k)), None)
        if width is None:
            return []
        return [self.noise(self.batch, self.tokens, width if isinstance(width, int) else width[0])]

    def positions(self, count: int) -> list[Any]:
        """Positions for rotary embeddings, for all rows at once or for each."""
        axes = len(self.config.get("axes_dims_rope") or (0, 0, 0))
        joint = torch.zeros(count, axes, device=self.device)
        return [joint, joint.expand(self.batch, count, axes)]

    def class_labels(self) -> list[Any]:
        if self.config.get("norm_type") == "ada_norm_zero":
            return [self.numbers(self.config["num_embeds_ada_norm"])]
        if self.config.get("class_embed_type") == "projection":
            return [self.noise(self.batch, self.config["projection_class_embeddings_input_dim"])]
        count = self.config.get("num_class_embeds")
        return [self.numbers(count)] if count else []

    def added_cond_kwargs(self) -> list[Any]:
        """What SDXL takes, a pooled prompt and sizes, or what PixArt takes, sizes or none."""
        if self.config.get("addition_embed_type") == "text_time":
            times = _TIME_IDS * self.config["addition_time_embed_dim"]
            pooled = self.config["projection_class_embeddings_input_dim"] - times
            sizes = torch.ones(self.batch, _TIME_IDS, device=self.device)
            return [{"text_embeds": self.noise(self.batch, pooled), "time_ids": sizes}]
        if self.config.get("norm_type") != "ada_norm_single":
            return []
        shapes = {
            "resolution": self.noise(self.batch, 2),
            "aspect_ratio": self.noise(self.batch, 1),
        }
        return [dict.fromkeys(shapes), shapes]


_ARGUMENTS: dict[str, Callable[[_Maker], list[Any]]] = {
    "timestep": lambda m: [m.numbers(_STEPS)],
    "encoder_hidden_states": _Maker.encoder_hidden_states,
    "encoder_attention_mask": lambda m: (
        [torch.ones(m.batch, m.tokens, dtype=torch.long, device=m.device)]
        if m.encoder_hidden_states()
        else []
    ),
    "pooled_projections": lambda m: (
        [m.noise(m.batch, m.config["pooled_projection_dim"])]
        if m.config.get("pooled_projection_dim")
        else []
    ),
    "guidance": lambda m: (
        [torch.ones(m.batch, device=m.device)] if m.config.get("guidance_embeds") else []
    ),
    "img_ids": lambda m: m.positions(m.height * m.width),
    "txt_ids": lambda m: m.positions(m.tokens),
    "img_shapes": lambda m: [[[(1, m.height, m.width)]] * m.batch],
    "num_frames": lambda m: [1],
    "height": lambda m: [m.height],
    "width": lambda m: [m.width],
    "class_labels": _Maker.class_labels,
    "added_cond_kwargs": _Maker.added_cond_kwargs,
}
