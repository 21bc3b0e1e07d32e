"""What happens to a patched model besides one step, compared with the unpatched one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def nodes_of(output: Tensor) -> set[Any]:
    """The nodes of autograd that lead to a tensor."""
    seen: set[Any] = set()
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return seen


def assert_backwards_add_up(ours: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Two backwards through one graph give the gradients of the unpatched model."""
    for one in (model, ours):
        loss = one(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for own, found in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad)


def assert_trains_alike(ours: nn.Module, model: nn.Module, batch: Callable[[int], Tensor]) -> None:
    """Steps of a fused optimizer, each of two batches, end at the weights of the unpatched model."""
    for one in (model, ours):
        # Adam's steps would hardly tell a gradient of another size
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9, fused=True)
        for number in range(4):
            for half in range(2):
                one(batch(10 * number + half)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.state_dict(), model.state_dict())
