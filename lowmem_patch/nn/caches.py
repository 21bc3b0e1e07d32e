"""Caches of keys and values, and blocks that run again in backward.

A second run of a block would write into a cache again. Unless ``use_cache=False`` is given, transformers'
decoders make a cache in training, too, which nobody reads. So a block that runs again gets no empty cache, as
with transformers' own checkpointing. Where a cache holds something, or the caller asks for one
(``use_cache=True`` or a cache among the arguments), the blocks do not run again.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

from lowmem_patch.errors import PatchError
from lowmem_patch.functional import in_compiler
from lowmem_patch.nn.own import Own

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# an attribute of a cache that a trace gives in the place of none
STANDS_FOR_NONE = "stands_for_none"

_WANTED = (
    "a forward in training was given use_cache=True or a cache of keys and values: blocks that a budget runs "
    "again in backward save all that they need in this forward, which is more than planned (fit=). Give "
    "use_cache=False where nobody reads the cache"
)
_WITHHELD = (
    "this cache of keys and values is empty: blocks that a budget (fit=) runs again in backward were not "
    "given it. Call the model with use_cache=True where a later forward shall read the cache"
)
_REPEATED = (
    "a block that runs several times in one forward was given a cache of keys and values, of which each run "
    "reads what those before wrote: it saves all that it needs, which is more than planned (fit=). Give "
    "use_cache=False where nobody reads the cache"
)
_CALLED_AGAIN = (
    "a block that a budget (fit=) runs again in backward was called twice in one forward with one cache of "
    "keys and values, which it was not given, and was called once where it was planned: call unpatch_model "
    "and patch_model again, or give use_cache=False"
)


class ForwardCaches:
    """The caches of keys and values of the running forward; one for all blocks.

    Attributes:
        recomputes: some of the blocks run again, and not under a compiler alone.
        wanted: the caller asks for one.
        withheld: empty ones that blocks were not given.
        calls: of blocks that were not given one: the block, its caches, and the numbers beside them.
    """

    def __init__(self, recomputes: bool = True) -> None:
        self.recomputes, self.wanted = recomputes, False
        self.withheld: list[Any] = []
        self.calls: set[tuple[int, ...]] = set()


def watch_caches(model: nn.Module, caches: ForwardCaches) -> None:
    """Look at each forward of the model; called for each block, it hangs its hooks on the model once."""
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(hook, Own) and hook.args[:1] == (caches,) for hook in hooks):
        return
    model.register_forward_pre_hook(Own(_begin, caches), with_kwargs=True)
    model.register_forward_hook(Own(_end, caches), always_call=True)


def _begin(
    caches: ForwardCaches, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    asked = bool(kwargs.get("use_cache")) or any(map(_is_real, _found_in(args, kwargs)))
    caches.wanted = asked and torch.is_grad_enabled()
    if caches.wanted and caches.recomputes and not in_compiler():
        warnings.warn(_WANTED, stacklevel=2)


def _end(caches: ForwardCaches, model: nn.Module, args: Any, output: Any) -> None:
    for cache in caches.withheld:  # the model may return it
        cache.get_seq_length = _refuse
    caches.wanted, caches.withheld, caches.calls = False, [], set()


def _refuse(*args: Any, **kwargs: Any) -> int:
    raise PatchError(_WITHHELD)


def without_empty_caches(
    block: nn.Module,
    caches: ForwardCaches,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    repeats: bool = False,
) -> _Arguments | None:
    """The arguments of a block that runs again, without caches; None where a cache is to be written.

    ``repeats``: the forward calls the block several times, and a call reads what those before wrote.

    Raises:
        PatchError: it does so with one cache, and is not known to.
    """
    found = _found_in(args, kwargs)
    if not found or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs
    if caches.wanted or not all(_is_empty(block, cache) for cache in found):
        return None
    real = [*filter(_is_real, found)]
    # which layer of the cache it is, where a block is told at each call
    numbers = [value for value in (*args, *kwargs.values()) if type(value) is int]
    if repeats and real and not numbers:
        if not in_compiler():
            warnings.warn(_REPEATED, stacklevel=2)
        return None
    if real and not in_compiler():
        _withhold(block, caches, real, numbers)
    return _without(found, args, kwargs)


def _without(found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Arguments with None in the place of these, which asks for none."""

    def without(value: Any) -> Any:
        return None if any(value is cache for cache in found) else value

    named = {name: without(value) for name, value in kwargs.items()}
    if named.get("use_cache"):
        named["use_cache"] = False
    return tuple(map(without, args)), named


def _withhold(
    block: nn.Module, caches: ForwardCaches, found: list[Any], numbers: list[int]
) -> None:
    known = caches.withheld
    known += [one for one in found if all(one is not other for other in known)]
    call = (id(block), *map(id, found), *numbers)
    if call in caches.calls:
        raise PatchError(_CALLED_AGAIN)
    caches.calls.add(call)


def _found_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return []
    return [value for value in (*args, *kwargs.values()) if isinstance(value, library.Cache)]


def _is_real(cache: Any) -> bool:
    """Whether keys and values can be written into it."""
    return not hasattr(cache, STANDS_FOR_NONE)


def _is_empty(block: nn.Module, cache: Any) -> bool:
    layers = (getattr(module, "layer_idx", None) for module in block.modules())
    layer = next((number for number in layers if isinstance(number, int)), 0)
    try:
        return not int(cache.get_seq_length(layer))
    except ValueError:  # a layer that has the keys and values of another (Gemma-3n)
        return not int(cache.get_seq_length())
