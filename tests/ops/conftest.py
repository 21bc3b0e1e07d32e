"""Where the ops are tested: reference on the CPU, kernels interpreted on the CPU, kernels on a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

# Triton decides when it is imported whether it interprets; test_interpreter.py starts such a process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Backend(NamedTuple):
    device: str
    implementation: str


if INTERPRETED:
    BACKENDS = [pytest.param(Backend("cpu", "triton"), id="triton-interpreted")]
else:
    BACKENDS = [
        pytest.param(Backend("cpu", "reference"), id="reference"),
        pytest.param(Backend("cuda", "reference"), id="reference-cuda", marks=pytest.mark.gpu),
        pytest.param(Backend("cuda", "triton"), id="triton-cuda", marks=pytest.mark.gpu),
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What asks for no backend here runs on the reference, also where kernels are interpreted: once is
    enough."""
    if not INTERPRETED:
        return
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    others = [item for item in here if "backend" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def part(*axes: Sequence[Any], of: int = 3) -> list[tuple[Any, ...]]:
    """All combinations where there is a GPU; elsewhere one of so many, in which each two values meet."""
    found = itertools.product(*(enumerate(axis) for axis in axes))
    thinned = INTERPRETED or not torch.cuda.is_available()
    return [
        tuple(value for _, value in combination)
        for combination in found
        if not (thinned and sum(number for number, _ in combination) % of)
    ]


def norm_grid(
    shapes: Sequence[tuple[int, ...]], cases: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> list[Any]:
    """Parameters (shape, centered, offset, dtype).

    The interpreter, which needs seconds for a wide row, takes a part of them in which each two values
    meet, and of the wide rows two cases that take every branch.
    """
    chosen = []
    for i, shape in enumerate(shapes):
        for j, case in enumerate(cases):
            for k, dtype in enumerate(dtypes):
                wide = shape[-1] > 8192
                if INTERPRETED and ((i + j - k) % len(dtypes) or (wide and j not in (1, 2))):
                    continue
                name = f"{shape}-{case.id}-{str(dtype).removeprefix('torch.')}"
                chosen.append(pytest.param(shape, *case.values, dtype, id=name))
    return chosen


def _poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    return poisoned


@pytest.fixture(autouse=True, scope="session")
def few_programs() -> Iterator[None]:
    """A program of the sums over partial rows takes 16 columns, and the interpreter milliseconds: here it
    takes 128, which leaves several programs for a wide row, the last of them with columns to spare."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr("lowmem_patch.kernels.norms_sums.TOTAL_COLUMNS", 128)
        yield


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Device and implementation; memory that kernels must fill starts as NaN or all ones."""
    monkeypatch.setattr(torch, "empty", _poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poison(torch.empty_like))
    monkeypatch.setattr(torch, "empty_strided", _poison(torch.empty_strided))
    # interpreted kernels run on numpy, which warns where the hardware gives the infinity we rely on
    with numpy.errstate(over="ignore"):
        yield request.param
