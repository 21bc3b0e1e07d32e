"""What the life-cycle tests compare: steps and trajectories in float64, parameters, and what is kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch import saved_bytes
from tests.patching.families import FAMILIES, Inputs
from tests.patching.helpers import Mode, _StayInFloat64, cast, in_mode, run, tensors_of

DOUBLE = Mode(torch.float64)
EXACT_AUTO = {"norms": "auto", "activations": "recompute"}  # auto without codes
# all in float64: what is wrong differs by its own size, share loses some digits of z
TOLERANCE = 1e-9


def doubles(make: Any, name: str) -> tuple[Any, Inputs]:
    """A family's model and inputs in float64."""
    return cast(make(name), torch.float64), in_mode(FAMILIES[name].inputs(), DOUBLE)


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        yield texts
    texts += [str(warning.message) for warning in found]


def assert_same_function(patched: nn.Module, stock: nn.Module, inputs: Inputs) -> None:
    """Outputs and every gradient, both models in float64."""
    for model in (patched, stock):
        model.zero_grad()
    found, expected = run(patched, inputs, DOUBLE), run(stock, inputs, DOUBLE)
    assert len(found.outputs) == len(expected.outputs)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert_close(ours, theirs, "output")
    assert set(found.gradients) == set(expected.gradients) and expected.gradients
    for name, gradient in expected.gradients.items():
        assert_close(found.gradients[name], gradient, name)


def assert_close(ours: Tensor, theirs: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    ours, theirs = ours.detach(), theirs.detach()
    error = float((ours - theirs).abs().max())
    assert error <= tolerance * (float(theirs.abs().max()) + 1e-3), (name, error)


def assert_same_parameters(model: nn.Module, stock: nn.Module) -> None:
    """Every parameter is bit-equal, trains as it did, and lies at the same place."""
    named, expected = dict(model.named_parameters()), dict(stock.named_parameters())
    assert list(named) == list(expected)
    for name, parameter in expected.items():
        assert torch.equal(named[name], parameter), name
        assert named[name].requires_grad is parameter.requires_grad, name
    assert list(model.state_dict()) == list(stock.state_dict())


def kept(model: nn.Module, inputs: Inputs) -> int:
    """Saved bytes of one forward."""
    model = copy.deepcopy(model)
    with warned(), saved_bytes(model) as saved:
        model(**inputs)
    return saved.activations


def trained(model: Any, inputs: Inputs, steps: int = 20, average: Any = None) -> Any:
    """The model after some steps of AdamW with weight decay; ``average`` follows each step."""
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=1e-3, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with _StayInFloat64():
            tensors_of(model(**inputs))[0].square().mean().backward()
        optimizer.step()
        if average is not None:
            average(model)
    return model


def assert_same_weights(model: nn.Module, stock: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert_close(ours.detach(), theirs.detach(), name, tolerance)
