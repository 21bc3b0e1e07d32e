"""Training steps of a patched model and its twin, compared to the bit."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from lowmem_patch import saved_bytes
from tests.patching.families import Inputs
from tests.patching.helpers import tensors_of

# norms are kept, since sharing recovers their input up to rounding
ALONE = {
    "norms": "keep", "activations": "recompute", "linear_inputs": "one_copy", "attention": "keep",
}  # fmt: skip
ROWS, WIDTH = 10, 16


def rows() -> Inputs:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))}


def step(
    model: Any, inputs: Inputs, autocast: bool = False, count: bool = False
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Output, gradients and saved bytes; to count puts hooks on every module."""
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}  # a dropout may write there
    counter = saved_bytes(model) if count else contextlib.nullcontext()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), counter as saved:
        output = tensors_of(model(**inputs))[0]
    output.float().square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients, 0 if saved is None else saved.activations


def assert_equal_steps(model: Any, twin: Any, inputs: Inputs, autocast: bool = False) -> int:
    """Every bit, with hooks and without; returns the bytes that the patch saved."""
    saved = 0
    for count in (False, True):
        found, ours, after = step(model, inputs, autocast, count)
        expected, theirs, before = step(twin, inputs, autocast, count)
        saved = before - after
        assert torch.equal(found, expected)
        assert set(ours) == set(theirs) and theirs
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    return saved
