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
    """Rare arguments by their names, beside text or patches."""
    parameters = inspect.signature(model.forward).parameters
    text = {"input_ids": torch.randint(3, 100, (2, 16))}
    rare = {name: make(model) for name, make in _RARE.items() if name in parameters}
    if rare:
        yield rare
        yield {**text, **rare} if "input_ids" in parameters else rare


def _boxes(model: Any) -> Tensor:
    corners = torch.randint(0, 10, (2, 16, 2))
    return torch.cat((corners, corners + 5), -1)


_RARE: dict[str, Callable[[Any], Any]] = {
    "bbox": _boxes,
}
