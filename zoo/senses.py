"""Text that holds images and sounds, as models of several senses are trained on it.

A model says itself how many tokens an image stands for: as many as its ``get_image_features`` gives.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zoo import arrays

Made = dict[str, Any]
_ARRAYS = ("pixel_values", "input_features", "input_values")
_LEAD, _TAIL = 4, 4  # words before and after what the text holds
_MOST_TOKENS = 512  # in a row


def lacks_senses(model: Any, given: Made) -> bool:
    """Whether the model makes features of images or sounds that its text may hold, and is given none."""
    can = any(_makes(model, method) for method, *_ in _SENSES)
    return can and not any(name.startswith(_ARRAYS) for name in given)


def _makes(model: Any, method: str) -> bool:
    return hasattr(model, method) and _token(model.config, _TOKENS[method]) is not None


def text_with_senses(model: Any) -> Iterator[Made]:
    """Text with all the senses that the model's features can be made of, then with each alone."""
    found = [
        (kind, made, count)
        for kind, sense in enumerate(_SENSES, 1)
        for made, count in _first_features(model, *sense)
    ]
    for senses in ([found] if len(found) > 1 else []) + [[one] for one in found]:
        yield _text(model, senses)


def _first_features(
    model: Any, method: str, part: str, options: Callable[[Any], Iterator[Made]]
) -> list[tuple[Made, int]]:
    """The first arrays of which the model makes features, with the number of tokens of each row."""
    if not _makes(model, method):
        return []
    make = getattr(model, method)
    parameters = inspect.signature(make).parameters
    owner = types.SimpleNamespace(config=arrays.part(model.config, part))
    for option in options(owner):
        made = {name: value for name, value in option.items() if name in parameters}
        try:
            with torch.no_grad():
                features = make(**made)
        except Exception:  # whatever a foreign forward raises: the next may do
            continue
        count = _rows(features)
        if count and count % 2 == 0 and count // 2 <= _MOST_TOKENS:
            return [(option, count // 2)]
    return []


def _rows(features: Any) -> int:
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(features, name, None) is not None:
            return _rows(getattr(features, name))
    if isinstance(features, Tensor):
        return features[..., 0].numel()
    return sum(_rows(part) for part in features) if isinstance(features, (list, tuple)) else 0


def _token(config: Any, names: tuple[str, ...]) -> int | None:
    """The first token of one of these names in the config or in a part of it."""
    for owner in arrays.parts(config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def _text(model: Any, senses: list[tuple[int, Made, int]]) -> Made:
    """Two rows of words around the tokens of each sense, and which token is of which sense."""
    words = arrays.tokens(model)
    ids, kinds, made = [words[:, :_LEAD]], [0] * _LEAD, Made()
    for kind, arrays_made, count in senses:
        method = _SENSES[kind - 1][0]
        token = _token(model.config, _TOKENS[method])
        around = [_token(model.config, names) for names in _AROUND[method]]
        row = [*around[:1], *[token] * count, *around[1:]]
        row = [value for value in row if value is not None]
        kinds += [kind * (value == token) for value in row]
        ids.append(torch.tensor([row, row]))
        made.update(arrays_made)
    ids.append(words[:, :_TAIL])
    kinds += [0] * _TAIL
    made["input_ids"] = torch.cat(ids, 1)
    made["mm_token_type_ids"] = torch.tensor([kinds, kinds])
    made["token_type_ids"] = made["mm_token_type_ids"]
    made["decoder_input_ids"] = words
    made.pop("attention_mask", None)  # of the sounds
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in made.items() if name in parameters}


def _images(model: Any) -> Iterator[Made]:
    """Images, lists of one, images in tiles, rows of patches with grids, rows of patches."""
    image = arrays.image(model)
    size = image.shape[-1]
    mask = torch.ones(2, size, size, dtype=torch.long)
    sizes = {"image_sizes": torch.tensor([[size, size]] * 2)}
    for images in (image, image[:, None], arrays.image_pairs(model)):
        masks = mask if images.dim() == 4 else mask[:, None].repeat(1, images.shape[1], 1, 1)
        for more in ({}, sizes):
            yield {
                "pixel_values": images,
                "pixel_mask": masks,
                "pixel_attention_mask": masks,
                "high_res_pixel_values": images,
                **more,
            }
    for patches in (arrays.patch_rows(model), arrays.patch_images(model)):
        yield {
            "pixel_values": patches,
            "image_grid_thw": arrays.grids(model),
            "image_grid_hw": arrays.grids(model)[:, 1:],
            "image_merge_sizes": torch.tensor([2, 2]),
            "images_per_sample": torch.tensor([1, 1]),
        }
    yield {
        "pixel_values": arrays.patch_rows(model).unflatten(0, (2, 16)),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "image_position_ids": arrays.positions(model),
    }
    yield {
        "pixel_values": arrays.patch_strip(model),
        "target_sizes": torch.tensor([[4, 4]] * 2),
    }


def _sounds(model: Any) -> Iterator[Made]:
    """Spectrograms by features or by frames, in windows of Whisper's length or short ones; waves."""
    for array in (arrays.spectrogram(model), arrays.features(model), arrays.features(model).mT):
        for frames in dict.fromkeys((array.shape[-1], array.shape[1])):
            for kind in (torch.long, torch.bool):
                mask = torch.ones(2, frames, dtype=kind)
                yield {
                    "input_features": array,
                    "input_features_mask": mask,
                    "feature_attention_mask": mask,
                    "attention_mask": mask,
                }
    yield {"input_values": torch.randn(2, 6400)}


_SENSES = (
    ("get_image_features", "vision_config", _images),
    ("get_audio_features", "audio_config", _sounds),
)
_TOKENS = {
    "get_image_features": ("image_token_id", "image_token_index", "image_patch_id"),
    "get_audio_features": ("audio_token_id", "audio_token_index"),
}
# what a model may want to find before and after
_AROUND = {
    "get_image_features": (
        ("vision_start_token_id", "image_start_token_id", "boi_token_id"),
        ("vision_end_token_id", "image_end_token_id", "eoi_token_id"),
    ),
    "get_audio_features": (
        ("audio_start_token_id", "boa_token_id"),
        ("audio_end_token_id", "eoa_token_id"),
    ),
}
