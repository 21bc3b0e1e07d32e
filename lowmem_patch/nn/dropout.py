"""A dropout whose mask autograd keeps in bits."""

from __future__ import annotations

from torch import Tensor, nn

from lowmem_patch.functional import draw_dropout, in_compiler, is_sharded, packed_dropout
from lowmem_patch.nn.context import needs_gradient
from lowmem_patch.nn.deferred import Deferred

__all__ = ["PackedDropout"]


class PackedDropout(nn.Dropout):
    """`torch.nn.Dropout`, from the same random numbers, that keeps one bit for each element.

    Out of training, without a gradient, in place, on DTensors and under torch.compile it is the plain
    one; so it is for a deferred input, which decides itself what is kept.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise, any shape; dtype of ``input``."""
        if (
            isinstance(input, Deferred)
            or self.inplace
            or not (self.training and 0 < self.p < 1 and input.numel() and needs_gradient(input))
            or in_compiler()
            or is_sharded(input)
        ):
            return super().forward(input)
        value, bits = draw_dropout(input, self.p)
        return packed_dropout(input, value, bits, self.p)
