"""Activation modules that keep two bits per element; in eval or without gradients, the plain function."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lowmem_patch.functional import ActivationKind, codes_activation
from lowmem_patch.nn.deferred import value_of

__all__ = ["CodesActivation", "ReGELU2", "ReQuickGELU2", "ReSiLU2"]


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


class ReGELU2(CodesActivation):
    """GELU with a 2-bit derivative; ``approximate`` as in `torch.nn.GELU`."""

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        super().__init__("gelu" if approximate == "none" else "gelu_tanh")


class ReSiLU2(CodesActivation):
    """SiLU with a 2-bit derivative."""

    def __init__(self) -> None:
        super().__init__("silu")


class ReQuickGELU2(CodesActivation):
    """QuickGELU, x sigmoid(1.702 x), with a 2-bit derivative."""

    def __init__(self) -> None:
        super().__init__("quick_gelu")
