"""Running a foreign forward on fake tensors, so that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["find_caches", "running_fake"]

_Cache = functools._lru_cache_wrapper


@contextlib.contextmanager
def running_fake(mode: FakeTensorMode) -> Iterator[None]:
    """``mode``, quietly: torch logs each op that refuses fake tensors, which callers handle.

    A forward may remember a table (of positions, say) in a functools cache, where the next real
    forward would find a fake one: caches that were filled meanwhile are emptied.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    misses = {id(cache): cache.cache_info().misses for cache in find_caches()}
    try:
        with mode:
            yield
    finally:
        logger.disabled = disabled
        for cache in find_caches():
            if cache.cache_info().misses > misses.get(id(cache), 0):
                cache.cache_clear()


_KNOWN: weakref.WeakSet[_Cache[Any]] = weakref.WeakSet()


def find_caches() -> list[_Cache[Any]]:
    """Every cache of the process but torch's own, also those in closures, which no module lists.

    Caches that were seen once are remembered: ``gc.freeze`` hides what it froze from later searches.
    """
    referrers = gc.get_referrers(_Cache)  # each cache refers to its type
    for thing in referrers:
        if type(thing) is _Cache and not str(thing.__module__).startswith("torch."):
            _KNOWN.add(thing)
    return list(_KNOWN)
