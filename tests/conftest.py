"""Settings that every test shares: no network, one seed, threads that fit the workers."""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
from collections.abc import Callable
from typing import Any

# Read once when huggingface_hub is imported, so set before any test module imports transformers.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# MKL's fast products on AMD processors depend on where a tensor lies, so that a recomputed block, with
# torch's own checkpointing too, would not give the same bits.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import numpy
import pytest
import torch

from lowmem_patch.tracing import isolation

# Several threads add up the gradients of gathered rows in no fixed order, and parallel workers share the
# cores: with more threads than cores everything runs slower.
torch.set_num_threads(1)

# Traces make and drop many small objects: with the default of 700 an eighth of the tests' time is garbage
# collection. Each file's own garbage is collected before it begins.
gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What may take longest comes first, so that no worker waits for another at the end. Without a GPU, one
    skipped test of each function stands for all: thousands cost time to report."""
    items.sort(key=_time_limit, reverse=True)
    if torch.cuda.is_available():
        return
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for first, *others in by_function.values():
        first.add_marker(pytest.mark.skip(reason=f"no CUDA device: {1 + len(others)} tests"))
        left_out.update(others)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _time_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Each test draws the same numbers, alone or in a full run, in any order."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """What was imported and collected leaves the garbage collector's sight: a million objects, which
    each full collection and each search for new caches would walk."""
    gc.collect()
    isolation.find_caches()
    gc.freeze()


@pytest.fixture
def make() -> Callable[[str], Any]:
    """``make("llama")``: a fresh copy of the family's model, built once a process."""
    return lambda name: copy.deepcopy(_built(name))


@functools.cache
def _built(name: str) -> Any:
    from tests.support.models import FAMILIES, build  # transformers, for whom needs it alone

    return build(FAMILIES[name])
