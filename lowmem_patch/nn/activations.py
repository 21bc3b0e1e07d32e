"""Activation modules that keep two bits per element; in eval or without gradients, the plain function."""

from __future__ import annotations

from torch import Tensor, nn

from lowmem_patch.functional import ActivationKind, codes_activation
from lowmem_patch.nn.deferred import value_of

__all__ = ["CodesActivation"]


class CodesActivation(nn.Module):
    """`codes_activation` as a module: exact forward, step-function derivative (arXiv 2406.16282).

    Args:
        kind: which activation.
        in_place: the result overwrites the input, for whoever reads that; autograd keeps no copy of it.
    """

    strategy = "codes"

    def __init__(self, kind: ActivationKind, in_place: bool = False) -> None:
        super().__init__()
        self.kind: ActivationKind = kind
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = value_of(x)
        y = codes_activation(x, self.kind)
        return x.copy_(y) if self.in_place else y

    def extra_repr(self) -> str:
        return f"strategy={self.strategy}, kind={self.kind}"
