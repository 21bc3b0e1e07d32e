"""Variants of timm's families: for each of its files two small models that hold a site."""

from __future__ import annotations

import collections
import copy
import re
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import _registry
from torch import nn

from lowmem_patch.tracing.inputs import ExampleInputs
from zoo.build import Built, CannotBuild, CannotRun, randomise, tensors_of

# from the smallest: words of variants' names
_SMALL = (
    "test", "atto", "femto", "pico", "nano", "xxs", "xxtiny", "xs", "xtiny", "tiny", "t", "s0", "b0", "0",
    "mini", "micro", "lite", "small", "s", "050", "10", "12", "18", "26",
)  # fmt: skip
_PER_FAMILY = 2
LARGEST = 100_000_000  # parameters
# ways to make a model smaller, where its constructor knows them
_SHRINKS: tuple[dict[str, Any], ...] = (
    {"img_size": 64, "depth": 2},
    {"img_size": 64, "depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 1, 1)},
    {"img_size": 64},
    {},
)


def _rank(name: str) -> tuple[int, int, str]:
    words = {*name.split("_"), *re.findall(r"[a-z]+|\d+", name)}
    small = next((i for i, word in enumerate(_SMALL) if word in words), len(_SMALL))
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return small, sum(numbers), name


def variants() -> list[str]:
    """Two variants of each of timm's model files, those whose names promise the smallest."""
    families: dict[str, list[str]] = collections.defaultdict(list)
    for name in timm.list_models():
        families[_registry._model_to_module[name]].append(name)
    found = []
    for family in sorted(families):
        ordered = sorted(families[family], key=_rank)
        # the second one shall differ by more than its size: another first part of the name if there is one
        first = ordered[0]
        stem = re.split(r"[_\d]", first)[0]
        others = [n for n in ordered[1:] if re.split(r"[_\d]", n)[0] != stem]
        found += [first, *(others or ordered[1:])[: _PER_FAMILY - 1]]
    return found


def _size(name: str, arguments: dict[str, Any]) -> int:
    try:
        with torch.device("meta"):
            model = timm.create_model(name, **arguments)
    except Exception as error:
        if "meta" not in str(error):
            raise
        return 0  # its constructor needs data: count the real one
    return sum(parameter.numel() for parameter in model.parameters())


def build_timm(name: str) -> Built:
    """A small model of a variant (``timm/<variant>`` in results) and an image that it reads.

    Raises:
        CannotBuild, CannotRun: with the reason of the last try.
    """
    if not timm.is_model(name):
        raise CannotBuild(f"timm {timm.__version__} has no {name}")
    refused: list[str] = []
    built = False
    for arguments in _SHRINKS:
        text = ", ".join(f"{k}={v}" for k, v in arguments.items()) or "as it is"
        try:
            size = _size(name, arguments)
            if size > LARGEST:
                refused.append(f"{text}: {size / 1e6:.0f} million parameters")
                continue
            torch.manual_seed(0)
            model = randomise(timm.create_model(name, **arguments))
        except ImportError as error:
            raise CannotBuild(str(error)) from error
        except Exception as error:  # a constructor without this argument, or that refuses its value
            refused.append(f"{text}: {type(error).__name__}: {str(error)[:150]}")
            continue
        built = True
        for inputs in _images(model, arguments):
            try:
                with torch.no_grad():
                    outputs = tensors_of(copy.deepcopy(model)(*inputs.args, **inputs.kwargs))
            except Exception as error:  # whatever a foreign forward raises
                refused.append(f"{text}, {inputs}: {type(error).__name__}: {str(error)[:150]}")
                continue
            if outputs and all(bool(torch.isfinite(t).all()) for t in outputs):
                parameters = sum(p.numel() for p in model.parameters())
                model.zoo_arguments = {"model_name": name, **arguments}
                return Built(f"timm/{name}", model, inputs, text, "zoo", parameters)
    raise (CannotRun if built else CannotBuild)(refused[-1] if refused else "nothing was tried")


def _images(model: Any, arguments: dict[str, Any]) -> list[ExampleInputs]:
    config = model.pretrained_cfg
    channels, height, width = config["input_size"]
    sizes = [(64, 64)] if "img_size" in arguments or not config.get("fixed_input_size") else []
    sizes += [(height, width)] if "img_size" not in arguments else []
    generator = torch.Generator().manual_seed(7)
    return [ExampleInputs((torch.randn(2, channels, h, w, generator=generator),)) for h, w in sizes]


def reload_timm(model: nn.Module, folder: str) -> nn.Module:
    """Write the patched model's state dict, and load it into a stock model."""
    path = Path(folder) / "weights.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path)
    stock = randomise(timm.create_model(**model.zoo_arguments))
    stock.load_state_dict(torch.load(path))
    return stock
