"""The repeated blocks of a model: which are equal, and a model of few of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowmem_patch.tracing.base_model import base_model, text_config

# fewer equal blocks than this are all run
_MANY_BLOCKS = 6
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def repeated_blocks(model: nn.Module, least: int = _MANY_BLOCKS) -> str | None:
    """The path of the list of equal blocks, ``least`` or more, that holds most parameters; its first may
    differ."""
    found: str | None = None
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < least:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > most and _are_equal(model, list(module)[1:]):
            found, most = name, size
    return found


def _are_equal(model: nn.Module, blocks: list[nn.Module]) -> bool:
    """Whether blocks have equal parts, with equal settings; a setting may count the blocks."""
    if len({_parts(block) for block in blocks}) > 1:
        return False
    settings = [_settings(block) for block in blocks]
    for number, kind in enumerate(_kinds(model, len(blocks) + 1)):
        for setting, value in zip(settings, kind[1:], strict=True):
            setting["kind", number] = value
    if len({tuple(setting) for setting in settings}) > 1:
        return False
    return all(_same_or_counting([setting[key] for setting in settings]) for key in settings[0])


def _parts(block: nn.Module) -> object:
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    tensors = (*block.named_parameters(), *block.named_buffers())
    return modules, tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in tensors)


def _settings(block: nn.Module) -> dict[object, Any]:
    return {
        (name, key): value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN)
    }


def _kinds(model: nn.Module, count: int) -> list[list[Any]]:
    """Lists in the config with an entry for each block, such as its kind of attention."""
    config: Any = getattr(base_model(model), "config", None)
    with contextlib.suppress(ValueError):  # it has several
        config = text_config(config)
    lists = [v for v in getattr(config, "__dict__", {}).values() if isinstance(v, (list, tuple))]
    return [list(value) for value in lists if len(value) == count]


def _same_or_counting(values: list[Any]) -> bool:
    if all(value == values[0] for value in values):
        return True
    whole = all(isinstance(value, int) for value in values)
    return whole and len({value - number for number, value in enumerate(values)}) == 1


@contextlib.contextmanager
def shortened(model: nn.Module, blocks: str, depth: int) -> Iterator[None]:
    """Only the first ``depth`` blocks while the context is open."""
    module = model.get_submodule(blocks)
    every = module._modules
    module._modules = dict(list(every.items())[:depth])
    try:
        yield
    finally:
        module._modules = every
