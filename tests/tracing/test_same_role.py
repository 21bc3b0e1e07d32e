"""Functions of one role are one to the plan and to a deferred tensor: the same bytes, the same gradients."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes

Step = Callable[..., Tensor]
PRODUCTS: dict[str, Step] = {
    "*": operator.mul,
    "mul": torch.mul,
    "multiply": torch.multiply,
    "Tensor.multiply": Tensor.multiply,
}
MOVES: dict[str, Step] = {
    "transpose": lambda h: h.transpose(0, 1),
    "swapaxes": lambda h: h.swapaxes(0, 1),
    "swapdims": lambda h: h.swapdims(0, 1),
}
CASTS: dict[str, Step] = {
    "to": lambda h: h.to(torch.float32),
    "float": lambda h: h.float(),
    "type": lambda h: h.type(torch.float32),
}


class Gated(nn.Module):
    def __init__(self, move: Step, product: Step, cast: Step) -> None:
        super().__init__()
        self.move, self.product, self.cast = move, product, cast
        self.norm, self.act = nn.LayerNorm(8), nn.SiLU()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.move(self.norm(x))
        gate = self.cast(self.act(self.gate(h)))
        y: Tensor = self.down(self.product(gate, self.up(h)))
        return y


def step(model: Any) -> tuple[int, list[Tensor]]:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    with saved_bytes(model) as saved:
        y = model(x)
    y.square().sum().backward()
    return saved.activations, [y.detach(), *(p.grad for p in model.parameters())]


def patched_bytes(move: Step, product: Step, cast: Step) -> int:
    torch.manual_seed(0)
    model: Any = Gated(move, product, cast)
    _, wanted = step(copy.deepcopy(model))
    patch_model(model, "exact", example_inputs=torch.zeros(2, 3, 8))
    saved, found = step(model)
    torch.testing.assert_close(found, wanted)
    return saved


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_save_the_same(product: str) -> None:
    others = MOVES["transpose"], CASTS["to"]
    saved = patched_bytes(others[0], PRODUCTS[product], others[1])
    assert saved == patched_bytes(others[0], PRODUCTS["*"], others[1])


@pytest.mark.parametrize("move", MOVES)
def test_row_moves_save_the_same(move: str) -> None:
    others = PRODUCTS["*"], CASTS["to"]
    assert patched_bytes(MOVES[move], *others) == patched_bytes(MOVES["transpose"], *others)


@pytest.mark.parametrize("cast", CASTS)
def test_casts_save_the_same(cast: str) -> None:
    others = MOVES["transpose"], PRODUCTS["*"]
    assert patched_bytes(*others, CASTS[cast]) == patched_bytes(*others, CASTS["to"])
