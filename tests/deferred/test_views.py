"""Writes into a view of a deferred activation, which is computed on its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
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
def test_it_is_refused(name: str) -> None:
    x = torch.randn(2, 5, 8)
    model = patch_model(Written(WRITES[name]), "exact", example_inputs=(x,))
    model.writes = True
    with pytest.raises(RuntimeError, match="share its memory"):
        model(x)
