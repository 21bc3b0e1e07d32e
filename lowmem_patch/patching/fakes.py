"""Running a foreign forward on fake tensors, so that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["running_fake"]

_Cache = functools._lru_cache_wrapper


@contextlib.contextmanager
def running_fake(mode: FakeTensorMode) -> Iterator[None]:
    """``mode``, quietly: torch logs each op that refuses fake tensors, which callers handle.

    A forward may remember a table (of positions, say) in a functools cache, where the next real
    forward would find a fake one: caches that were filled meanwhile are emptied.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    misses = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        with mode:
            yield
    finally:
        logger.disabled = disabled
        for cache in _caches():
            if cache.cache_info().misses > misses.get(id(cache), 0):
                cache.cache_clear()


def _caches() -> list[_Cache[Any]]:
    """Every cache of the process but torch's own, also those in closures, which no module lists."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is _Cache and not str(thing.__module__).startswith("torch.")
    ]
