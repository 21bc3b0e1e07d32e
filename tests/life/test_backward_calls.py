"""backward() and autograd.grad called on what a patched module returned, with a checkpoint behind it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from tests.support.judge import TOLERANCE, assert_close
from tests.support.models import randomise


class Stack(nn.Module):
    """A checkpointed MLP, and a norm or a head whose output is returned."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()
        self.down, self.last, self.extra = nn.Linear(16, 8), last, nn.Linear(8, 8)

    def block(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(checkpoint(self.block, x, use_reentrant=False))
        if isinstance(self.last, nn.LayerNorm):
            self.extra(y)  # for which the norm is worth a patch
        return y


LAST: dict[str, Any] = {
    "norm": lambda: nn.LayerNorm(8),
    "head": lambda: nn.Linear(8, 40, bias=False),
}


@pytest.mark.parametrize("call", ["backward", "grad"])
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("linear_inputs", ["keep", "one_copy"])
def test_blocks_run_again_as_patched(last: str, call: str, linear_inputs: str) -> None:
    torch.manual_seed(0)
    stock = randomise(Stack(LAST[last]())).double().train()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    config = {"norms": "share", "activations": "recompute", "linear_inputs": linear_inputs}
    patched = patch_model(copy.deepcopy(stock), config, example_inputs=x)
    found = []
    for model in (stock, patched):
        y = model(x)
        start = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        named = [(n, p) for n, p in model.named_parameters() if not n.startswith("extra")]
        names, parameters = zip(*named, strict=True)
        if call == "grad":
            gradients = torch.autograd.grad(y, parameters, start)
        else:
            y.backward(start)
            gradients = tuple(parameter.grad for parameter in parameters)
        found.append(dict(zip(names, gradients, strict=True)))
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, name, TOLERANCE)
