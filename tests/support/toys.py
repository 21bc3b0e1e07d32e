"""A small network whose dataflow a test writes itself, and a comparison with its unpatched twin."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch import patch_model
from tests.patching.helpers import randomise, twin_of

FOLD = {"norms": "fold", "activations": "recompute"}
SHARE = {"norms": "share", "activations": "recompute"}
CONFIGS = [FOLD, SHARE]


class FunctionalLinear(torch.autograd.Function):
    """A Linear as fused kernels write it: gradients by hand, and no torch function to see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.t() @ x.flatten(0, -2), rows.sum(0)


class CustomLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return FunctionalLinear.apply(x, self.weight, self.bias)


class Toy(nn.Module):
    """``body(self, x)`` says what happens between the first Linear and the last."""

    def __init__(
        self, body: Callable[[Any, Tensor], Tensor], linear: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up = linear(8, 16)
        self.gate = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = linear(16, 8)
        self.last = nn.LayerNorm(8)
        self.leave = nn.Linear(8, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.last(x + self.body(self, x)))


def mlp(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(net.up(net.norm(x))))


def gated(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    return net.down(net.act(net.gate(h)) * net.up(h))


def batch() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5))


def patched_twin(
    model: Any, config: Any, change: Callable[[Any], None] = lambda model: None
) -> tuple[Any, Any, Any]:
    """The model patched, an unpatched one with the same (folded) weights, and the original."""
    randomise(model)
    original = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch_model(model, config, example_inputs=batch())
    change(model)
    return model, twin_of(original, model), original


def assert_equal_steps(
    patched: Any, twin: Any, original: Any, inputs: Sequence[Tensor] = ()
) -> None:
    """Outputs equal the original's; gradients of every parameter equal the twin's, and none is lost.

    Each draws the same random numbers.
    """

    def run(model: Any, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        y: Tensor = model(x)
        return y

    for x in inputs or (batch(),):
        y, same, before = (run(model, x) for model in (patched, twin, original))
        torch.testing.assert_close(y, before, rtol=1e-4, atol=1e-5)
        start = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        y.backward(start)
        same.backward(start)
        for (name, ours), theirs in zip(patched.named_parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
