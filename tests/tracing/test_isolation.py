"""What runs on fake tensors leaves nothing in caches, also in those that nobody has seen before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.memory.step import watched_step
from lowmem_patch.tracing.fake_mode import make_fake_mode
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import find_caches, running_fake
from lowmem_patch.tracing.shadow import make_shadow


def cached() -> Any:
    return functools.lru_cache(lambda size: torch.zeros(size))


def is_found(cache: Any) -> bool:
    return any(found is cache for found in find_caches())


def test_a_cache_that_is_made_after_a_search_is_found() -> None:
    find_caches()
    one = cached()
    assert is_found(one)
    # the number of caches stays
    del one
    other = cached()
    assert is_found(other)


def test_caches_that_were_filled_on_fake_tensors_are_empty_afterwards() -> None:
    known, made = cached(), list[Callable[[int], Tensor]]()
    known(2)
    kept = functools.lru_cache(str)
    kept(1)
    with running_fake(make_fake_mode()):
        made.append(cached())
        for table in (known, *made):
            table(3)
    for table in (known, *made):
        assert type(table(3)) is Tensor
    assert kept.cache_info().currsize == 1  # of a cache that nothing was added to


def test_a_reference_that_is_gone_hides_no_cache() -> None:
    kind = type(
        functools.lru_cache(str)
    )  # one reference to the type more, while caches are counted
    find_caches()
    made: list[Any] = []
    with running_fake(make_fake_mode()):
        del kind
        made.append(cached())
        made[0](3)
    assert type(made[0](3)) is Tensor


def test_a_predicted_step_leaves_no_fake_table_in_a_cache() -> None:
    """A forward may remember a table, which a real forward would find fake."""
    table = cached()

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + table(4)

    with watched_step(make_shadow(Model(4, 4), ExampleInputs((torch.ones(2, 4),)))):
        pass
    assert type(table(4)) is Tensor
