"""Writes into a view of a deferred activation, which is computed on its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from lowmem_patch import patch_model
from tests.support.judge import assert_same_outputs


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor], object], act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), act, nn.Linear(32, 8)
        self.write = write
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        if self.writes:  # on a path that the trace did not see
            self.write(h)
        y: Tensor = self.down(h)
        return y


WRITES: dict[str, Callable[[Tensor], object]] = {
    "rows": lambda h: h[:, :2].mul_(2),
    "viewed": lambda h: h.view(-1, 32)[3:].zero_(),
    "transposed": lambda h: h.transpose(0, 1)[0].mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
def test_it_is_seen_where_the_values_are_stored(name: str) -> None:
    x = torch.randn(2, 5, 8)
    original = Written(WRITES[name], nn.GELU())
    model = patch_model(copy.deepcopy(original), "exact", example_inputs=(x,))
    original.writes = model.writes = True
    assert_same_outputs(model, original, x)
    for one in (original, model):
        one(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", WRITES)
def test_it_is_refused_where_the_values_wait(name: str) -> None:
    x = torch.randn(2, 5, 8)
    waiting = Written(WRITES[name], QuickGELUActivation())
    model = patch_model(waiting, "exact", example_inputs=(x,))
    model.writes = True
    with pytest.raises(RuntimeError, match="share its memory"):
        model(x)
