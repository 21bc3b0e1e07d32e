"""8-bit storage behind a norm whose output Linears read as a copy in autocast's dtype (BERT)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from lowmem_patch.constants import EIGHT_BIT_GROUP
from tests.support.judge import assert_close
from tests.support.saved import saved_storages

WIDTH = 128


class PostNorm(nn.Module):
    """Two Linears and a residual read the output of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.LayerNorm(WIDTH)
        self.look: Callable[[Tensor], Any] = lambda h: None
        self.run: Callable[..., Tensor] = lambda function, h: function(h)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x) + x)
        self.look(h)
        y: Tensor = self.last(h + self.run(self.between, h))
        return y

    def between(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(h).tanh() + self.gate(h))
        return y


def written(h: Tensor) -> None:
    with torch.no_grad():
        h.mul_(2)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda h: None,
    "a hook": lambda h: h.register_hook(lambda gradient: gradient * 2),
    "a write": written,
    "its values": lambda h: h.sum().item(),
}
RUNS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda function, h: function(h),
    "checkpoint": lambda function, h: checkpoint(function, h, use_reentrant=False),  # type: ignore[no-any-return]
    "reentrant": lambda function, h: checkpoint(function, h, use_reentrant=True),  # type: ignore[no-any-return]
}


def pair() -> tuple[Any, Any, Tensor]:
    """Patched with 8 bits, and exactly."""
    torch.manual_seed(0)
    stock, x = PostNorm(), torch.randn(4, 8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        return (
            *(
                patch_model(copy.deepcopy(stock), p, example_inputs=(x,))
                for p in ("compact", "exact")
            ),
            x,
        )  # type: ignore[return-value]


def gradients(model: Any, x: Tensor) -> dict[str, Tensor]:
    for _ in range(2):  # the second adds to the first
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("look", LOOKS)
def test_gradients_are_along_the_exact_ones(look: str, run: str) -> None:
    ours, theirs, x = pair()
    found = []
    for model in (ours, theirs):
        model.look, model.run = LOOKS[look], RUNS[run]
        found.append(gradients(model, x))
    for name, exact in found[1].items():
        own = found[0][name]
        assert torch.cosine_similarity(own.flatten(), exact.flatten(), 0) > 0.999, name
        assert_close(own.norm(), exact.norm(), name, 0.01)


def test_each_linear_is_one_op_that_shares_what_the_norm_stored() -> None:
    ours, theirs, x = pair()
    sizes = []
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            _, saved = saved_storages(lambda model=model: model(x))
        sizes.append(sum(saved.values()))
    # the inputs of enter and down, and the copy, for the norm and both Linears
    assert sizes[1] - sizes[0] == 3 * (x.numel() - 2 * x.numel() // EIGHT_BIT_GROUP)
    nodes: list[str] = []
    for linear in (ours.up, ours.gate):
        linear.register_forward_hook(lambda module, args, y: nodes.append(y.grad_fn.name()))
    with torch.autocast("cpu", torch.bfloat16):
        ours(x)
    assert nodes == ["_StoredLinearBackward"] * 2
