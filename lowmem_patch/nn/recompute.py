"""An activation whose value is never saved: its readers recompute it in backward, exactly."""

from __future__ import annotations

from torch import Tensor, nn

from lowmem_patch.functional import ActivationKind, activation, is_transformed
from lowmem_patch.nn.context import is_foreign, needs_gradient
from lowmem_patch.nn.deferred import value_of
from lowmem_patch.nn.deferred_ops import Activation


class RecomputedActivation(nn.Module):
    """Returns a `lowmem_patch.nn.deferred.Deferred` tensor where a gradient is wanted, else ``act(x)``."""

    def __init__(self, kind: ActivationKind, low_precision: bool = False, reads: int = 0) -> None:
        super().__init__()
        self.kind = kind
        self.op = Activation(kind, low_precision, reads)

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, any shape; dtype of ``x``."""
        x = value_of(x)
        if needs_gradient(x) and not is_foreign(x) and not is_transformed():
            return self.op.of((x,))
        return activation(x, self.kind)

    def extra_repr(self) -> str:
        return f"{self.kind}, recompute"
