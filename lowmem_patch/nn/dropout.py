"""Dropouts whose mask autograd keeps in bits: modules, and calls of the function."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, packed_dropout
from lowmem_patch.nn.context import is_foreign, needs_gradient
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.deferred_ops import Saved

_SAVED = Saved()


class PackedDropout(nn.Dropout):
    """`torch.nn.Dropout`, from the same random numbers, that keeps one bit for each element.

    Out of training, without a gradient, in place, on tensors of other classes (DTensor), under torch.func and
    under torch.compile it is the plain one; so it is for a deferred input, which decides what is kept.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise, any shape; dtype of ``input``."""
        if (
            isinstance(input, Deferred)
            or self.inplace
            or not (self.training and 0 < self.p < 1 and input.numel() and needs_gradient(input))
            or in_compiler()
            or is_foreign(input)
        ):
            return super().forward(input)
        return packed_dropout(input, self.p)[0]


def keep_for_dropout(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Forward hook of a Linear: ``F.dropout`` of its output keeps one bit for each element."""
    if in_compiler() or not module.training or is_foreign(output) or not needs_gradient(output):
        return None
    return _SAVED.of(output)
