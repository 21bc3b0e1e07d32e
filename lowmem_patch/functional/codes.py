"""Activations that keep two bits per element: exact forward, step-function derivative.

Approx-BP (arXiv 2406.16282): the forward is the framework's own function h; backward multiplies by
the derivative of h~, which takes four values (see `lowmem_patch.constants`). Saved: the codes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import CODES_PER_WORD, ActivationKind
from lowmem_patch.functional import _library, sharded
from lowmem_patch.functional._checks import check_floating, check_table
from lowmem_patch.functional._implementation import Implementation, module, resolve

__all__ = ["codes_activation", "regelu2", "requickgelu2", "resilu2"]


def _forward(x: Tensor, kind: ActivationKind, implementation: str) -> tuple[Tensor, Tensor]:
    y, codes = module(implementation).codes_forward(x, kind)
    return y, codes


def _forward_fake(x: Tensor, kind: ActivationKind, implementation: str) -> tuple[Tensor, Tensor]:
    words = (x.numel() + CODES_PER_WORD - 1) // CODES_PER_WORD
    return x.new_empty(x.shape), x.new_empty(words, dtype=torch.int16)


def _backward(
    dy: Tensor, codes: Tensor, kind: ActivationKind, dtype: torch.dtype, implementation: str
) -> Tensor:
    dx: Tensor = module(implementation).codes_backward(dy, codes, kind, dtype)
    return dx


def _backward_fake(
    dy: Tensor, codes: Tensor, kind: ActivationKind, dtype: torch.dtype, implementation: str
) -> Tensor:
    return dy.new_empty(dy.shape, dtype=dtype)


_codes_forward = _library.define(
    "codes_activation(Tensor x, str kind, str implementation) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_codes_backward = _library.define(
    "codes_activation_backward(Tensor dy, Tensor codes, str kind, ScalarType dtype, "
    "str implementation) -> Tensor",
    _backward,
    _backward_fake,
)


class _CodesActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, direct: bool, x: Tensor, kind: ActivationKind, implementation: str
    ) -> Any:
        if direct:
            y, codes = _forward(x, kind, implementation)
        else:
            with _library.below_autograd():
                y, codes = _codes_forward(x, kind, implementation)
            # without this, backward would be handed a zero tensor of the codes' size
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(codes)
        ctx.save_for_backward(codes)
        ctx.settings = (kind, x.dtype, implementation)
        return y if direct else (y, codes)

    @staticmethod
    @_library.first_order("codes_activation")
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        if dy is None:
            return None, None, None, None
        (codes,) = ctx.saved_tensors
        backward = _backward if _library.is_eager(dy, codes) else _codes_backward
        return None, backward(dy, codes, *ctx.settings), None, None


_codes_activation = _library.attach_autograd(_codes_forward, _CodesActivation)


def codes_activation(
    x: Tensor, kind: ActivationKind, *, implementation: Implementation = "auto"
) -> Tensor:
    """h(x), keeping two bits per element for backward; the gradient is approximate.

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
    y: Tensor = _codes_activation(x, kind, chosen)
    return y


def regelu2(
    x: Tensor,
    approximate: Literal["none", "tanh"] = "none",
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """`codes_activation` with GELU; ``approximate`` as in `torch.nn.functional.gelu`."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"regelu2: approximate must be 'none' or 'tanh', got {approximate!r}")
    kind: ActivationKind = "gelu" if approximate == "none" else "gelu_tanh"
    return codes_activation(x, kind, implementation=implementation)


def resilu2(x: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """`codes_activation` with SiLU."""
    return codes_activation(x, "silu", implementation=implementation)


def requickgelu2(x: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """`codes_activation` with QuickGELU, x sigmoid(1.702 x)."""
    return codes_activation(x, "quick_gelu", implementation=implementation)
