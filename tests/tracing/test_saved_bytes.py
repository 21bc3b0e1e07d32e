"""`saved_bytes` counts what forwards save, whatever else runs in its context."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, saved_bytes


class Gated(nn.Module):
    """Convolutions whose inputs wait: behind a norm and an activation, and behind a gate of halves."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.SiLU())
        self.last = nn.Sequential(nn.Conv1d(4, 8, 1), nn.GLU(dim=1), nn.Conv1d(4, 4, 1))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.checkpoints:
            h = checkpoint(self.last, h, use_reentrant=True)
            assert isinstance(h, Tensor)
            return h
        y: Tensor = self.last(h)
        return y


def counted(*, checkpoints: bool, backward: bool) -> int:
    torch.manual_seed(0)
    net, x = Gated(checkpoints), torch.randn(2, 4, 16)
    patch_model(net, "exact", example_inputs=(x,))
    with saved_bytes(net) as saved:
        loss = net(x).square().sum()
        if backward:
            loss.backward()
    return saved.activations


def test_a_backward_in_the_context_adds_nothing() -> None:
    """Neither values that wait, nor graphs of chains, which are made again there."""
    forward = counted(checkpoints=False, backward=False)
    assert counted(checkpoints=False, backward=True) == forward > 0


def test_a_block_that_runs_again_in_backward_adds_nothing() -> None:
    forward = counted(checkpoints=True, backward=False)
    assert counted(checkpoints=True, backward=True) == forward > 0
    assert forward < counted(checkpoints=False, backward=False)


def test_a_forward_without_gradients_saves_nothing() -> None:
    net, x = Gated(checkpoints=False), torch.randn(2, 4, 16)
    with torch.no_grad(), saved_bytes(net) as saved:
        net(x)
    assert saved.activations == 0
