"""A small network whose dataflow a test writes itself, and small networks around one module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch import patch_model
from tests.support.judge import assert_gradients, assert_outputs
from tests.support.models import randomise
from tests.support.step import FP32, step, truth_of, twin_of


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


def assert_same_steps(
    patched: Any, twin: Any, original: Any, inputs: Sequence[Tensor] = ()
) -> None:
    """Outputs agree with the original's, and gradients of every parameter with the twin's; none is lost.

    Folding changes weights, and with them gradients; the outputs must stay.
    """
    for x in inputs or (batch(),):
        found, own, before = (step(model, x, FP32) for model in (patched, twin, original))
        assert_outputs(found, before, truth_of(original, x, backward=False), FP32)
        assert_gradients(found, own, truth_of(twin, x), FP32)


class Around(nn.Module):
    """A module between two Linears; ``call(inner, x)`` says how it is called."""

    def __init__(self, inner: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(width, width), inner, nn.Linear(width, width)
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda inner, x: inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.call(self.inner, self.enter(x)))


class Outer(nn.Module):
    """A model that holds a block, which others may hold as well."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


# activations of rows, for networks of Linears 16 wide
ROWS, WIDTH = 10, 16


def rows(*shape: int) -> Tensor:
    """``shape`` is that of the rows, which are ``ROWS`` where none is given."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*(shape or (ROWS,)), WIDTH, generator=generator)
