"""Activations that save two bits per element: exact forward, step-function derivative.

Approx-BP (arXiv 2406.16282): the forward is the framework's own function h; backward multiplies by
the derivative of h~, which takes four values (see `lowmem_patch.constants`). Saved: the codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import CODES_PER_WORD, ActivationKind
from lowmem_patch.functional import _library, sharded
from lowmem_patch.functional._checks import check_floating, check_table
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve

__all__ = ["codes_activation"]


def _forward_fake(x: Tensor, kind: ActivationKind, implementation: str) -> tuple[Tensor, Tensor]:
    words = (x.numel() + CODES_PER_WORD - 1) // CODES_PER_WORD
    return x.new_empty(x.shape), x.new_empty(words, dtype=torch.int16)


_codes = _library.Operator(
    "codes_activation(Tensor x, str kind, str implementation) -> (Tensor, Tensor)",
    dispatched("codes_forward"),
    _forward_fake,
)
_codes_backward = _library.Operator(
    "codes_activation_backward(Tensor dy, Tensor codes, str kind, ScalarType dtype, "
    "str implementation) -> Tensor",
    dispatched("codes_backward"),
    lambda dy, codes, kind, dtype, implementation: dy.new_empty(dy.shape, dtype=dtype),
)


class _CodesActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        y, codes = _codes.implementation(*arguments)
        _CodesActivation.save(ctx, arguments, (y, codes))
        return y

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, kind, implementation = inputs
        ctx.save_for_backward(output[1])
        ctx.settings = (kind, x.dtype, implementation)

    @staticmethod
    @_library.first_order("codes_activation")
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        dx = None if dy is None else _codes_backward(dy, *ctx.saved_tensors, *ctx.settings)
        return dx, None, None


_call_codes = _codes.differentiable(_CodesActivation)


def codes_activation(
    x: Tensor, kind: ActivationKind, *, implementation: Implementation = "auto"
) -> Tensor:
    """h(x), which saves two bits per element for backward; the gradient is approximate.

    dx = dy * h~'(x), where h~' is the step function of `STEP_TABLES[kind]` (arXiv 2406.16282).
    Without gradients this is the framework's function and nothing is packed.

    Args:
        x: ``[...]``, float16, bfloat16, float32 or float64.
        kind: which activation.
        implementation: see `resolve`.

    Returns:
        ``[...]``, dtype of ``x`` (under autocast too), contiguous.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: ``kind`` has no step table.
    """
    check_table("codes_activation", kind)
    check_floating("codes_activation", "x", x)
    if sharded.is_sharded(x):
        return reference.activate(x, kind)
    chosen = resolve(implementation, x)
    if not _library.wants_gradient(x):
        return reference.activate(x, kind)
    y: Tensor = _call_codes(x, kind, chosen)
    return y
