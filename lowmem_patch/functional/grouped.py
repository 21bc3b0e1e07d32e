"""A grouped matmul (one weight per expert) behind an activation, which saves the activation's input.

As ``linear``: torch's grouped_mm saves hidden = h(x) or h(gate) * up for the weights' gradient, and here
hidden is recomputed from the sources when that is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.constants import ActivationKind
from lowmem_patch.functional import _library
from lowmem_patch.functional.activations import activation, glu

__all__ = ["activation_grouped_matmul"]

Multiply = Callable[..., Tensor]


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        multiply: Multiply,
        hidden: Tensor,
        source: Tensor,
        up: Tensor | None,
        weight: Tensor,
        offsets: Tensor,
        kind: ActivationKind,
    ) -> Any:
        needs_hidden, needs_weight = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        ctx.save_for_backward(
            source if needs_weight else None,
            up if needs_weight else None,
            weight if needs_hidden else None,
            offsets,
        )
        ctx.multiply, ctx.kind = multiply, kind
        return multiply(hidden, weight, offs=offsets)

    @staticmethod
    @_library.first_order("activation_grouped_matmul")
    def backward(ctx: Any, dy: Tensor) -> Any:
        source, up, weight, offsets = ctx.saved_tensors
        d_hidden = d_weight = None
        dy = dy.contiguous()
        if weight is not None:
            d_hidden = ctx.multiply(dy, weight.transpose(-2, -1), offs=offsets)
        if source is not None:
            hidden = activation(source, ctx.kind) if up is None else glu(source, up, ctx.kind)
            # the order of torch's own backward, for equal bits
            d_weight = ctx.multiply(dy.t(), hidden, offs=offsets).transpose(-2, -1)
        return None, d_hidden, None, None, d_weight, None, None


def activation_grouped_matmul(
    multiply: Multiply,
    hidden: Tensor,
    sources: tuple[Tensor, ...],
    weight: Tensor,
    offsets: Tensor,
    kind: ActivationKind,
) -> Tensor:
    """``multiply(hidden, weight, offs=offsets)`` that saves ``sources`` instead of ``hidden``.

    The gradient of ``sources`` does not pass through this op: it flows through the node that
    computed ``hidden``.

    Args:
        multiply: torch's grouped_mm.
        hidden: ``[S, F]``, computed as ``activation(sources[0], kind)`` or ``glu(*sources, kind)``.
        sources: one or two tensors of the shape and dtype of ``hidden``.
        weight: ``[E, F, O]``.
        offsets: ``[E]``, the end of each expert's rows.
        kind: which activation.

    Returns:
        ``[S, O]``.
    """
    up = sources[1] if len(sources) == 2 else None
    apply: Any = _GroupedMatmul.apply
    y: Tensor = apply(multiply, hidden, sources[0], up, weight, offsets, kind)
    return y
