"""Example inputs for a trace, made from what the model says of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.errors import TraceError

__all__ = ["ExampleInputs", "as_example_inputs", "make_example_inputs"]


@dataclasses.dataclass(frozen=True)
class ExampleInputs:
    """Arguments of one forward; tensors may lie on any device."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def map(self, function: Any) -> ExampleInputs:
        """Apply ``function`` to every tensor."""
        tree_map = torch.utils._pytree.tree_map_only
        return ExampleInputs(
            tree_map(Tensor, function, self.args), tree_map(Tensor, function, self.kwargs)
        )

    def __str__(self) -> str:
        named = {**{f"input {i}": v for i, v in enumerate(self.args)}, **self.kwargs}
        return ", ".join(
            f"{name} {'x'.join(map(str, v.shape))}"
            for name, v in named.items()
            if isinstance(v, Tensor)
        )


def as_example_inputs(inputs: Any) -> ExampleInputs:
    """A tensor, a tuple of arguments or a mapping of keyword arguments, as a user gives them."""
    if isinstance(inputs, ExampleInputs):
        return inputs
    if isinstance(inputs, Tensor):
        return ExampleInputs((inputs,))
    if hasattr(inputs, "keys"):
        return ExampleInputs((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return ExampleInputs(tuple(inputs))
    raise TraceError(
        "example_inputs must be a tensor, a tuple or a dict of keyword arguments, "
        f"got {type(inputs).__name__}"
    )


def make_example_inputs(
    model: Any,
    *,
    batch_size: int = 2,
    sequence_length: int | None = None,
    device: torch.device | str | None = None,
) -> ExampleInputs:
    """Inputs for a transformers or timm model (also inside a PEFT wrapper), from its config.

    Args:
        sequence_length: tokens per row for models that read tokens (default 16).
        device: default: the device of the model's first parameter; the CPU for a meta model.

    Raises:
        TraceError: the model says nothing about its inputs; pass ``example_inputs=``.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameter = next(base.parameters(), None)
    if device is None:
        device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    dtype = torch.float32 if parameter is None else _floating_dtype(base)
    config = getattr(base, "config", None)
    if config is not None and hasattr(base, "main_input_name"):
        return _transformers_inputs(base, config, batch_size, sequence_length or 16, device, dtype)
    cfg = getattr(base, "pretrained_cfg", None) or getattr(base, "default_cfg", None)
    if cfg is not None:
        return ExampleInputs(
            (torch.randn(batch_size, *_image_size(base, cfg), device=device, dtype=dtype),)
        )
    raise TraceError(
        f"{type(base).__name__} is neither a transformers nor a timm model, so its inputs are unknown: "
        "pass example_inputs= (a tensor, a tuple or a dict of keyword arguments)"
    )


def _floating_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def _image_size(model: Any, cfg: Any) -> tuple[int, int, int]:
    size = cfg["input_size"] if isinstance(cfg, dict) else cfg.input_size
    channels, height, width = (int(s) for s in size)
    embed = getattr(model, "patch_embed", None)
    if embed is not None and getattr(embed, "img_size", None) is not None:
        height, width = (int(s) for s in embed.img_size)
    projection = getattr(embed, "proj", None)
    if isinstance(projection, nn.Conv2d):
        channels = projection.in_channels
    return channels, height, width


def _transformers_inputs(
    model: Any, config: Any, batch: int, length: int, device: Any, dtype: torch.dtype
) -> ExampleInputs:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", None) or 2)
    tokens = torch.randint(0, max(2, min(vocabulary, 1000)), (batch, length), device=device)
    name = model.main_input_name
    if name == "input_ids":
        # no mask: transformers drops one of ones from its data, which a trace without data cannot do
        kwargs: dict[str, Any] = {"input_ids": tokens}
        if getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = tokens.clone()
        return ExampleInputs((), kwargs)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = getattr(vision, "num_channels", None) or 3
        images = torch.randn(batch, channels, height, width, device=device, dtype=dtype)
        return ExampleInputs((), {"pixel_values": images})
    raise TraceError(
        f"{type(model).__name__} reads {name!r}, for which no example can be made: pass example_inputs="
    )
