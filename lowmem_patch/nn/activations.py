"""Activation modules that keep a few bits per element; in eval or without gradients, the plain function."""

from __future__ import annotations

from torch import Tensor, nn

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import ActivationKind, codes_activation
from lowmem_patch.nn.deferred import value_of


class CodesActivation(nn.Module):
    """`codes_activation` as a module: exact forward, step-function derivative (arXiv 2406.16282).

    Args:
        kind: which activation.
        bits: of each code, 1 to 4.
        in_place: the result overwrites the input, for whoever reads that; autograd keeps no copy of it.
    """

    strategy = "codes"

    def __init__(self, kind: ActivationKind, bits: int = 2, in_place: bool = False) -> None:
        super().__init__()
        self.kind: ActivationKind = kind
        self.bits = bits
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = value_of(x)
        y = codes_activation(x, self.kind, self.bits)
        return x.copy_(y) if self.in_place else y

    def extra_repr(self) -> str:
        return f"strategy={self.strategy}, kind={self.kind}, bits={STEP_TABLES[self.kind][self.bits].bits}"
