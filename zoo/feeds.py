"""Inputs for the zoo's models: the package's own, and makers for arguments that few models take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.errors import LowmemPatchError
from lowmem_patch.patching.examples import make_example_inputs
from lowmem_patch.patching.inputs import ExampleInputs
from zoo.overrides import FEEDS

__all__ = ["feeds"]


def feeds(model_type: str, model: Any) -> Iterator[tuple[str, ExampleInputs]]:
    """Inputs to try, each with where it comes from; the package's own first."""
    torch.manual_seed(0)
    own = FEEDS.get(model_type)
    if own is not None:
        yield "zoo", ExampleInputs((), own(model.config))
        return
    try:
        made = make_example_inputs(model)
        if any(_image_size_is_free(name, value) for name, value in made.kwargs.items()):
            yield "package, smaller images", ExampleInputs((), _smaller(made.kwargs))
        yield "package", made
        if "use_cache" in inspect.signature(model.forward).parameters:
            yield "package, use_cache=False", ExampleInputs((), {**made.kwargs, "use_cache": False})
    except LowmemPatchError as error:
        last = error
    else:
        last = None
    for kwargs in _by_name(model):
        yield "zoo", ExampleInputs((), kwargs)
    if last is not None:
        raise last


def _image_size_is_free(name: str, value: Any) -> bool:
    """Images of the default size, which convolutional models take in any size."""
    return name == "pixel_values" and value.shape[-1] >= 224


def _smaller(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v[..., :64, :64].clone() if k == "pixel_values" else v for k, v in kwargs.items()}


def _by_name(model: Any) -> Iterator[dict[str, Any]]:
    """What the forward requires, by the names of its arguments; then all that can be made."""
    parameters = inspect.signature(model.forward).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        name
        for name, p in parameters.items()
        if p.default is inspect.Parameter.empty and p.kind not in variadic
    ]
    for variant in _VARIANTS:
        if variant.get("pixel_values") in _BY_GRIDS and not parameters.keys() & _GRIDS:
            continue
        made: dict[str, Any] = {}
        for name in parameters:
            value = variant.get(name, _RARE.get(name, lambda _: None))(model)
            if value is not None:
                made[name] = value
        if set(required) <= set(made):
            least = {name: made[name] for name in required}
            if required:
                yield least
            yield {name: value for name, value in made.items() if name not in _INSTEAD}
            yield {name: value for name, value in made.items() if name not in _SPARE}
            for names in _SETS:
                if made.keys() >= set(names):
                    yield {**{name: made[name] for name in names}, **least}


def _number(model: Any, *names: str, default: int) -> int:
    """The first of these numbers that the model's config or a part of it gives."""
    configs = [model.config]
    configs += [c for c in vars(model.config).values() if hasattr(c, "to_dict")]
    for name in names:
        for config in configs:
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def _tokens(model: Any) -> Tensor:
    return torch.randint(3, min(100, _number(model, "vocab_size", default=100)), (2, 16))


def _states(*names: str) -> Callable[[Any], Tensor]:
    return lambda model: torch.randn(2, 16, _number(model, *names, default=32))


def _boxes(model: Any) -> Tensor:
    corners = torch.randint(0, 10, (2, 16, 2))
    points = _number(model, "dim_bbox", default=4) // 2
    return torch.cat([corners + i for i in range(points)], -1)


def _image(model: Any) -> Tensor:
    size = _number(model, "image_size", default=64)
    return torch.randn(2, _number(model, "num_channels", default=3), size, size)


def _image_pairs(model: Any) -> Tensor:
    return torch.stack((_image(model), _image(model)), 1)


def _patch_rows(model: Any) -> Tensor:
    """Two images as rows of flattened patches, for models that read them with their grids."""
    channels = _number(model, "in_channels", "num_channels", "in_chans", default=3)
    side = _number(model, "patch_size", default=14)
    depth = _number(model, "temporal_patch_size", default=1)
    return torch.randn(2 * 16, channels * depth * side * side)


def _grids(model: Any) -> Tensor:
    return torch.tensor([[1, 4, 4], [1, 4, 4]])


def _series(model: Any) -> Tensor:
    length = _number(model, "context_length", default=16)
    channels = _number(model, "num_input_channels", default=0)
    # with lags, a model that lists its features reads that much more of the past
    lags = max(getattr(model.config, "lags_sequence", None) or [0])
    return torch.randn(2, length + lags, *([channels] if channels else []))


def _time_features(model: Any) -> Tensor:
    lags = max(getattr(model.config, "lags_sequence", None) or [0])
    length = _number(model, "context_length", default=16) + lags
    return torch.randn(2, length, getattr(model.config, "num_time_features", 1))


def _future(model: Any) -> Tensor:
    return torch.randn(2, _number(model, "prediction_length", default=8))


def _future_features(model: Any) -> Tensor:
    length = _number(model, "prediction_length", default=8)
    return torch.randn(2, length, getattr(model.config, "num_time_features", 1))


def _frames(model: Any) -> int:
    """A window of Whisper's length where the config gives one, else a short one."""
    return 2 * _number(model, "max_source_positions", default=64)


def _bins(model: Any) -> int:
    return _number(
        model, "num_mel_bins", "feature_size", "input_feat_size", "input_size", "input_dim", "n_mels",
        "num_mel_filters", default=80,
    )  # fmt: skip


def _spectrogram(model: Any) -> Tensor:
    return torch.randn(2, _bins(model), _frames(model))


def _features(model: Any) -> Tensor:
    return torch.randn(2, 128, _bins(model))


def _patch_images(model: Any) -> Tensor:
    rows = _patch_rows(model)
    side = _number(model, "patch_size", default=14)
    return rows.unflatten(-1, (-1, side, side))


def _codebooks(model: Any) -> int:
    return _number(model, "num_codebooks", "n_q", "num_quantizers", "num_channels", default=4)


def _codes(*shape: int) -> Tensor:
    return torch.randint(3, 30, shape)


# names that say that a model reads rows of flattened patches
_GRIDS = frozenset(
    ("grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids", "image_grid_hws")
)
# whole ways to read the names that models disagree about
_VARIANTS: tuple[dict[str, Callable[[Any], Any]], ...] = (
    {
        "grid_thw": _grids,
        "image_grid_thw": _grids,
        "pixel_values": _patch_rows,
        "hidden_states": _patch_rows,
    },
    {
        "grid_thw": _grids,
        "image_grid_thw": _grids,
        "pixel_values": _patch_images,
        "hidden_states": _patch_images,
    },
    {
        "grid_thw": _grids,
        "image_grid_thw": _grids,
        "pixel_values": lambda model: _patch_images(model)[None],
    },
    {
        "pixel_values": lambda model: _patch_rows(model).unflatten(0, (2, 16)),
    },
    {
        "input_ids": lambda model: _codes(2 * _codebooks(model), 16),
        "input_features": lambda model: _features(model)[..., :1].repeat(1, 1, 2 * _bins(model)),
    },
    {
        "input_ids": lambda model: _codes(2, 16, _codebooks(model)),
        "input_features": lambda model: torch.randn(_bins(model), 256),
    },
    {
        "input_ids": lambda model: _codes(2, _codebooks(model), 16),
    },
    {
        "input_features": _spectrogram,
        "input_features_mask": lambda model: torch.ones(2, _frames(model), dtype=torch.long),
    },
    {
        "input_features": _features,
        "input_features_mask": lambda model: torch.ones(2, 128, dtype=torch.bool),
        "pixel_values": lambda model: _image_pairs(model),
        "hidden_states": _image,
    },
    {
        "input_features": lambda model: _features(model)[:, None],
        "pixel_values": lambda model: torch.randn(2, 3, 64, 64),
        "is_longer": lambda model: torch.ones(2, 1, dtype=torch.bool),
    },
)
_BY_GRIDS = (_patch_rows, _patch_images)
_SETS = (
    ("input_ids",),
    ("inputs_embeds",),
    ("inputs_embeds", "encoder_hidden_states"),
    ("pixel_values",),
    ("input_features",),
    ("input_values",),
    ("input_ids", "pixel_values"),
    ("input_ids", "pixel_values", "image_embeds_position_mask"),
    ("input_ids", "input_features"),
    ("input_ids", "input_features", "is_longer"),
    ("input_ids", "encoder_hidden_states"),
    ("input_features", "attention_mask"),
    ("input_features", "feature_lens"),
    ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("input_features", "input_features_mask"),
)
_RARE: dict[str, Callable[[Any], Any]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "input_values": lambda model: torch.randn(2, 6400),
    "input_features": _spectrogram,
    "audio_mel": _features,
    "audio_mel_mask": lambda model: torch.zeros(2, 128, dtype=torch.bool),
    "image": _image,
    "spectrogram": lambda model: torch.randn(2, 32, _number(model, "model_in_dim", default=80)),
    "num_patches": lambda model: 2,
    "pixel_position_ids": lambda model: torch.cartesian_prod(*2 * [torch.arange(4)]).expand(
        2, 16, 2
    ),
    "spatial_shapes": lambda model: torch.tensor([[4, 4], [4, 4]]),
    "moe_mm_token_type_ids": lambda model: torch.zeros(2, 16, dtype=torch.long),
    "num_frames": lambda model: 2,
    "image_embeds_position_mask": lambda model: (
        torch.arange(16).expand(2, 16) < _number(model, "latent_query_num", default=8)
    ).long(),
    "pixel_attention_mask": lambda model: torch.ones(2, 16, dtype=torch.long),
    "feature_lens": lambda model: torch.tensor([128, 128]),
    "qformer_input_ids": _tokens,
    "bbox": _boxes,
    "pixel_values": _image,
    "hidden_states": _states("hidden_size", "d_model"),
    "inputs_embeds": _states("hidden_size", "d_model", "dim"),
    "query_embeds": _states("hidden_size"),
    "encoder_hidden_states": _states("encoder_hidden_size", "hidden_size", "d_model"),
    "visual_feats": lambda model: torch.randn(2, 5, _number(model, "visual_feat_dim", default=16)),
    "visual_pos": lambda model: torch.rand(2, 5, _number(model, "visual_pos_dim", default=4)),
    "past_values": _series,
    "past_time_features": _time_features,
    "past_observed_mask": lambda model: torch.ones_like(_series(model)),
    "future_values": _future,
    "future_time_features": _future_features,
    "mm_token_type_ids": lambda model: torch.zeros(2, 16, dtype=torch.long),
    "states": lambda model: torch.randn(2, 16, _number(model, "state_dim", default=17)),
    "actions": lambda model: torch.randn(2, 16, _number(model, "act_dim", default=4)),
    "rewards": lambda model: torch.randn(2, 16, 1),
    "returns_to_go": lambda model: torch.randn(2, 16, 1),
    "timesteps": lambda model: torch.arange(16).expand(2, 16),
    "input_points": lambda model: torch.rand(2, 1, 2, 2),
    "flattened_patches": lambda model: torch.cat(
        (
            torch.arange(1, 17).expand(2, 16)[..., None].float(),
            torch.ones(2, 16, 1),
            torch.randn(2, 16, _number(model, "patch_embed_hidden_size", default=768)),
        ),
        -1,
    ),
}
# arguments that stand for others, and optional ones that another may replace or contradict
_INSTEAD = frozenset(("inputs_embeds",))
_SPARE = _INSTEAD | {"hidden_states", "encoder_hidden_states", "decoder_input_ids", "num_frames"}
