"""Activations that save one to four bits per element: exact forward, step-function derivative.

Approx-BP (arXiv 2406.16282): the forward is the framework's own function h; backward multiplies by
the derivative of h~, which takes 2^bits values (see `lowmem_patch.constants`). Saved: the codes.
Where h itself has a derivative of two values (ReLU and its kin), one bit is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import STEP_TABLES, ActivationKind, codes_bytes
from lowmem_patch.functional import _library, sharded
from lowmem_patch.functional._checks import check_floating, check_table
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve


def _forward_fake(
    x: Tensor, kind: ActivationKind, bits: int, implementation: str
) -> tuple[Tensor, Tensor]:
    size = codes_bytes(x.numel(), STEP_TABLES[kind][bits].bits)
    return x.new_empty(x.shape), x.new_empty(size, dtype=torch.uint8)


_codes = _library.Operator(
    "codes_activation(Tensor x, str kind, int bits, str implementation) -> (Tensor, Tensor)",
    dispatched("codes_forward"),
    _forward_fake,
)
_codes_backward = _library.Operator(
    "codes_activation_backward(Tensor dy, Tensor codes, str kind, int bits, ScalarType dtype, "
    "str implementation) -> Tensor",
    dispatched("codes_backward"),
    lambda dy, codes, kind, bits, dtype, implementation: dy.new_empty(dy.shape, dtype=dtype),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, kind, bits, implementation = inputs
    ctx.save_for_backward(output[1])
    ctx.settings = (kind, bits, x.dtype, implementation)


@_library.first_order("codes_activation")
def _gradient(ctx: Any, dy: Tensor | None, *_: None) -> Any:
    dx = None if dy is None else _codes_backward(dy, *ctx.saved_tensors, *ctx.settings)
    return dx, None, None, None


_call_codes = _codes.differentiable(_save, _gradient)


def codes_activation(
    x: Tensor, kind: ActivationKind, bits: int = 2, *, implementation: Implementation = "auto"
) -> Tensor:
    """h(x), which saves ``bits`` bits per element for backward; the gradient is approximate.

    dx = dy * h~'(x), where h~' is the step function of `STEP_TABLES[kind][bits]` (arXiv 2406.16282).
    Where that is h' itself (ReLU, LeakyReLU, ReLU6, hardsigmoid), one bit is saved and the gradient is exact.
    Without gradients this is the framework's function and nothing is packed.

    Args:
        x: ``[...]``, float16, bfloat16, float32 or float64.
        kind: which activation.
        bits: 1 to 4.
        implementation: see `resolve`.

    Returns:
        ``[...]``, dtype of ``x`` (under autocast too), contiguous.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: ``kind`` has no step table for ``bits``.
    """
    check_table("codes_activation", kind, bits)
    check_floating("codes_activation", "x", x)
    if sharded.is_sharded(x):
        return reference.activate(x, kind)
    chosen = resolve(implementation, x)
    if not _library.wants_gradient(x):
        return reference.activate(x, kind)
    y: Tensor = _call_codes(x, kind, bits, chosen)
    return y
