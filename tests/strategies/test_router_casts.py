"""A router of experts reads a float32 cast of a norm's bf16 output, by a weight that is cast as well."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model
from tests.support.judge import assert_same_step
from tests.support.saved import saved_storages
from tests.support.step import BF16

WIDTH, ROWS, EXPERTS = 64, 24, 4


class Routed(nn.Module):
    """Experts, weighted by a router; ``gathers``: they also read rows of the norm's output."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH)
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        rows = h.view(-1, WIDTH)
        scores = F.linear(rows.type(torch.float32), self.router.type(torch.float32)).sigmoid()
        out = self.up(h) * scores.sum(-1, keepdim=True).to(h.dtype)
        return out + rows[torch.arange(ROWS).flip(0)] if self.gathers else out


@pytest.mark.parametrize("gathers", [False, True])
def test_router_saves_no_float32_copy_of_the_norms_output(gathers: bool) -> None:
    torch.manual_seed(0)
    model = Routed(gathers).to(torch.bfloat16)
    twin, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    patch_model(model, "exact", example_inputs=x)
    sizes = [saved_storages(lambda m=m: m(x))[1].values() for m in (model, twin)]
    copies = [sum(size == ROWS * WIDTH * 4 for size in found) for found in sizes]
    assert copies[0] == 0 < copies[1]
    assert_same_step(model, twin, x, BF16)
