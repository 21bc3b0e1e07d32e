"""What the floor counts where rows are repeated, heads are gated, or an activation has no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import plan_patch
from tests.strategies.test_chains_behind_views import EXPERTS, HEADS, SIZE, Experts, Heads, plain
from tests.support.toys import WIDTH, rows

ROW = len(rows()) * 4  # bytes of one number a row


class Decided(nn.Module):
    """A sigmoid that only decides which rows count, beside a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.linear = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        counts = self.score(x).sigmoid().mean(-1, keepdim=True) > 0.5
        return self.linear(x) * counts


@pytest.mark.parametrize(
    ("body", "numbers", "codes"),
    [
        # the input of the router and of all experts, and the logits of the scores
        (Experts(), WIDTH + EXPERTS, 0),
        # the input of up and gate, the heads, and the gates
        (Heads(plain), WIDTH + HEADS * SIZE + HEADS, 0),
        (Decided(), WIDTH, 0),
    ],
    ids=["repeated rows", "gated heads", "no gradient"],
)
def test_numbers_of_a_row(body: Any, numbers: int, codes: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 3))
    report = plan_patch(net, "exact", example_inputs=(rows(),))
    ends = 2 * WIDTH  # the inputs of the first Linear and of the last
    assert report.floor == ROW * (numbers + ends) + codes
