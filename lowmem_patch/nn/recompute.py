"""An activation whose value is never kept: its consumer recomputes it in backward, exactly."""

from __future__ import annotations

from torch import Tensor, nn

from lowmem_patch.functional import ActivationKind, activation, is_sharded
from lowmem_patch.nn.context import has_backward_hooks, needs_gradient
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_ops import DeferredActivation

__all__ = ["RecomputedActivation"]


class RecomputedActivation(nn.Module):
    """Returns a :class:`~lowmem_patch.nn.deferred.Deferred` where a gradient is wanted, else ``act(x)``."""

    def __init__(self, kind: ActivationKind, lowers: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.lowers = lowers

    def forward(self, x: Tensor) -> Tensor | Deferred:
        """Elementwise, any shape; dtype of ``x``."""
        x = value_of(x)
        # who reads a DTensor looks for one, by isinstance
        if not has_backward_hooks(self) and needs_gradient(x) and not is_sharded(x):
            return DeferredActivation((x,), self.kind, self.lowers)
        return activation(x, self.kind)

    def extra_repr(self) -> str:
        return f"{self.kind}, recompute"
