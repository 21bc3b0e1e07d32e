"""Inputs for the zoo's models: the package's own, and makers for arguments that few models take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowmem_patch.errors import LowmemPatchError
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs
from zoo import arrays
from zoo.own_feeds import FEEDS
from zoo.senses import text_with_senses


def feeds(model_type: str, model: Any) -> Iterator[tuple[str, ExampleInputs]]:
    """Inputs to try, each with where it comes from; the package's own first."""
    torch.manual_seed(0)
    own = FEEDS.get(model_type)
    if own is not None:
        yield "zoo", ExampleInputs((), own(model.config))
        return
    for kwargs in text_with_senses(model):
        yield "zoo, senses in text", ExampleInputs((), kwargs)
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
        if variant.keys() & _GRIDS and not parameters.keys() & _GRIDS:
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


# names that say that a model reads rows of flattened patches
_GRIDS = frozenset(
    (
        "grid_thw",
        "image_grid_thw",
        "spatial_shapes",
        "pixel_position_ids",
        "image_grid_hws",
        "target_sizes",
    )
)
# whole ways to read the names that models disagree about
_VARIANTS: tuple[dict[str, Callable[[Any], Any]], ...] = (
    {
        "grid_thw": arrays.grids,
        "image_grid_thw": arrays.grids,
        "pixel_values": arrays.patch_rows,
        "hidden_states": arrays.patch_rows,
    },
    {
        "grid_thw": arrays.grids,
        "image_grid_thw": arrays.grids,
        "pixel_values": arrays.patch_images,
        "hidden_states": arrays.patch_images,
    },
    {
        "grid_thw": arrays.grids,
        "image_grid_thw": arrays.grids,
        "pixel_values": lambda model: arrays.patch_images(model)[None],
    },
    {
        "pixel_values": lambda model: arrays.patch_rows(model).unflatten(0, (2, 16)),
    },
    {
        "pixel_values": arrays.patch_strip,
        "target_sizes": lambda model: arrays.grids(model)[:, 1:],
    },
    {
        "input_ids": lambda model: arrays.codes(2 * arrays.codebooks(model), 16),
        "input_features": lambda model: arrays.features(model)[..., :1].repeat(
            1, 1, 2 * arrays.bins(model)
        ),
    },
    {
        "input_ids": lambda model: arrays.codes(2, 16, arrays.codebooks(model)),
        "input_features": lambda model: torch.randn(arrays.bins(model), 256),
    },
    {
        "input_ids": lambda model: arrays.codes(2, arrays.codebooks(model), 16),
    },
    {
        "input_features": arrays.spectrogram,
        "input_features_mask": lambda model: torch.ones(2, arrays.frames(model), dtype=torch.long),
    },
    {
        "input_features": arrays.features,
        "input_features_mask": lambda model: torch.ones(2, 128, dtype=torch.bool),
        "pixel_values": lambda model: arrays.image_pairs(model),
        "hidden_states": arrays.image,
    },
    {
        "input_features": lambda model: arrays.features(model)[:, None],
        "pixel_values": lambda model: torch.randn(2, 3, 64, 64),
        "is_longer": lambda model: torch.ones(2, 1, dtype=torch.bool),
    },
)
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
    "input_ids": arrays.tokens,
    "decoder_input_ids": arrays.tokens,
    "input_values": lambda model: torch.randn(2, 6400),
    "input_features": arrays.spectrogram,
    "audio_mel": arrays.features,
    "audio_mel_mask": lambda model: torch.zeros(2, 128, dtype=torch.bool),
    "image": arrays.image,
    "spectrogram": lambda model: torch.randn(
        2, 32, arrays.number(model, "model_in_dim", default=80)
    ),
    "latents": lambda model: arrays.states("hidden_size")(model).mT,
    "patch_embeds": lambda model: arrays.patch_map(model),
    "mel_spectrogram": lambda model: torch.randn(
        2, arrays.number(model, "mel_dim", default=80), 16
    ),
    "task_inputs": arrays.tokens,
    "merge_sizes": lambda model: torch.tensor([2, 2]),
    "num_patches": lambda model: 2,
    "pixel_position_ids": arrays.positions,
    "spatial_shapes": lambda model: torch.tensor([[4, 4], [4, 4]]),
    "moe_mm_token_type_ids": lambda model: torch.zeros(2, 16, dtype=torch.long),
    "num_frames": lambda model: 2,
    "image_embeds_position_mask": lambda model: (
        torch.arange(16).expand(2, 16) < arrays.number(model, "latent_query_num", default=8)
    ).long(),
    "pixel_attention_mask": lambda model: torch.ones(2, 16, dtype=torch.long),
    "feature_lens": lambda model: torch.tensor([128, 128]),
    "qformer_input_ids": arrays.tokens,
    "bbox": arrays.boxes,
    "pixel_values": arrays.image,
    "hidden_states": arrays.states("hidden_size", "d_model"),
    "inputs_embeds": arrays.states("hidden_size", "d_model", "dim"),
    "query_embeds": arrays.states("hidden_size"),
    "encoder_hidden_states": arrays.states("encoder_hidden_size", "hidden_size", "d_model"),
    "visual_feats": lambda model: torch.randn(
        2, 5, arrays.number(model, "visual_feat_dim", default=16)
    ),
    "visual_pos": lambda model: torch.rand(2, 5, arrays.number(model, "visual_pos_dim", default=4)),
    "past_values": arrays.series,
    "past_time_features": arrays.time_features,
    "past_observed_mask": lambda model: torch.ones_like(arrays.series(model)),
    "future_values": arrays.future,
    "future_time_features": arrays.future_features,
    "mm_token_type_ids": lambda model: torch.zeros(2, 16, dtype=torch.long),
    "states": lambda model: torch.randn(2, 16, arrays.number(model, "state_dim", default=17)),
    "actions": lambda model: torch.randn(2, 16, arrays.number(model, "act_dim", default=4)),
    "rewards": lambda model: torch.randn(2, 16, 1),
    "returns_to_go": lambda model: torch.randn(2, 16, 1),
    "timesteps": lambda model: torch.arange(16).expand(2, 16),
    "input_points": lambda model: torch.rand(2, 1, 2, 2),
    "flattened_patches": lambda model: torch.cat(
        (
            torch.arange(1, 17).expand(2, 16)[..., None].float(),
            torch.ones(2, 16, 1),
            torch.randn(2, 16, arrays.number(model, "patch_embed_hidden_size", default=768)),
        ),
        -1,
    ),
}
# arguments that stand for others, and optional ones that another may replace or contradict
_INSTEAD = frozenset(("inputs_embeds",))
_SPARE = _INSTEAD | {"hidden_states", "encoder_hidden_states", "decoder_input_ids", "num_frames"}
