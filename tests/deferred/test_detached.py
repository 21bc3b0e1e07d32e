"""Deferred tensors that are cut off from their graph or turned in place, and edges to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.nn.deferred import Unstored
from tests.support.chained import CHAINS
from tests.support.judge import assert_same_step
from tests.support.toys import Toy, assert_same_steps, batch, patched_twin

MADE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "activation": lambda net, x: net.act(net.up(net.norm(x))),
    "activation of a norm": lambda net, x: net.act(net.up(net.norm(x)).relu()),
    "gated product": lambda net, x: net.act(net.gate(x)) * net.up(x),
    "chain": lambda net, x: torch.sigmoid(1.7 * net.gate(x)) * net.gate(x) * (net.up(x) + 1),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_detach_in_place_cuts_later_readers_off(made: Any) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = made(net, x)
        if hasattr(net, "cut"):
            h.detach_()
            assert not h.requires_grad
        y: Tensor = net.down(h)
        return y

    patched, twin, original = patched_twin(Toy(body), CHAINS)
    for model in (patched, twin, original):
        model.cut = True
    assert_same_steps(patched, twin, original)
    patched(batch()).sum().backward()
    assert patched.up.weight.grad is None


def test_detached_logits_give_the_head_no_gradient(make: Any) -> None:
    """A loss of them is a number to log; another loss trains the head."""
    model = make("llama").train()
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs={"input_ids": ids})
    found = []
    for one in (model, patched):
        logits = one(ids).logits
        logits.detach_()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        assert not loss.requires_grad
        found.append(loss)
    torch.testing.assert_close(found[1], found[0])


def test_a_transposition_in_place_in_front_of_a_convolution_is_seen() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
            self.conv = nn.Conv1d(8, 8, 3, padding=1)
            self.in_place = False

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sigmoid(1.7 * self.gate(x)) * self.gate(x) * (self.up(x) + 1)
            if self.in_place:
                h.transpose_(1, 2)
            y: Tensor = self.conv(h if self.in_place else h.transpose(1, 2))
            return y

    torch.manual_seed(0)
    plain = nn.Sequential(Block())
    patched = patch_model(copy.deepcopy(plain), "exact", example_inputs=batch())
    plain[0].in_place = patched[0].in_place = True
    assert_same_step(patched, plain, batch())


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "unsqueeze_": lambda h: h.unsqueeze_(-1),
    "squeeze_": lambda h: h.squeeze_(0),
    "t_": lambda h: h.t_(),
    "transpose_": lambda h: h.transpose_(0, 1),
    "as_strided_": lambda h: h.as_strided_((8, 4), (1, 8)),
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_a_value_without_storage_has_the_shape_that_it_gets_in_place(turn: Any) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
            self.turns = False

        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate(x)
            h = torch.sigmoid(1.7 * gate) * gate * (self.up(x) + 1)
            if not self.turns:
                y: Tensor = self.down(h)
                return y
            given, waits = h, isinstance(h, Unstored)
            turn(h)
            self.turned = waits, given is h, h.shape, h.stride(), h.detach().clone()
            return h.square().sum()

    torch.manual_seed(0)
    plain = nn.Sequential(Block())
    patched = patch_model(copy.deepcopy(plain), CHAINS, example_inputs=torch.randn(4, 8))
    x = torch.randn(1 if turn is TURNS["squeeze_"] else 4, 8)
    found = []
    for model in (patched, plain):
        model[0].turns = True
        model(x).backward()
        found.append((model[0].turned, model[0].up.weight.grad))
    (waited, *turned), (_, *wanted) = (one for one, _ in found)
    assert waited and turned[:3] == wanted[:3] and turned[0]
    torch.testing.assert_close(turned[3], wanted[3])
    torch.testing.assert_close(found[0][1], found[1][1])


def test_the_gradient_edge_of_a_read_activation_is_a_clear_error() -> None:
    edges: list[Any] = []

    def body(net: Any, x: Tensor) -> Tensor:
        h = net.act(net.up(net.norm(x)))
        if hasattr(net, "early"):
            edges.append(torch.autograd.graph.get_gradient_edge(h))
        y: Tensor = net.down(h) + h[..., :8]
        if hasattr(net, "late"):
            torch.autograd.graph.get_gradient_edge(h)
        return y

    patched, twin, _ = patched_twin(Toy(body), CHAINS)
    patched.late = True
    with pytest.raises(RuntimeError, match="call get_gradient_edge before the tensor is read"):
        patched(batch())
    del patched.late
    found = []
    for model in (patched.double(), twin.double()):
        model.early = True
        loss = model(batch().double()).square().sum()
        found.append(torch.autograd.grad(loss, edges.pop())[0])
    torch.testing.assert_close(found[0], found[1])
