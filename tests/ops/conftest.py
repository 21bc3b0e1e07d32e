"""Where the ops are tested: reference on the CPU, kernels interpreted on the CPU, kernels on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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


def _poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    return poisoned


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Device and implementation; memory that kernels must fill starts as NaN or all ones."""
    monkeypatch.setattr(torch, "empty", _poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poison(torch.empty_like))
    monkeypatch.setattr(torch, "empty_strided", _poison(torch.empty_strided))
    # interpreted kernels run on numpy, which warns where the hardware gives the infinity we rely on
    with numpy.errstate(over="ignore"):
        yield request.param
