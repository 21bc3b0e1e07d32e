"""Activations: exact ones and gated products, which save their inputs and nothing else, and codes.

`codes_activation` saves one to four bits per element (Approx-BP, arXiv 2406.16282): the forward is the
framework's own function h; backward multiplies by the derivative of h~, which takes 2^bits values (see
`lowmem_patch.constants`). Where h itself has a derivative of two values (ReLU and its kin), one bit is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import STEP_TABLES, ActivationKind, codes_bytes
from lowmem_patch.functional import _library, compiled
from lowmem_patch.functional._implementation import (
    Implementation,
    check_floating,
    dispatched,
    module,
    resolve,
)
from lowmem_patch.functional._ownership import can_be_overwritten

# torch has no operator of its own for the first two, and its operators save the output of the others
_NOT_TORCHS = ("quick_gelu", "relu_squared", "relu", "sigmoid", "tanh")


def _forward(x: Tensor, up: Tensor | None, kind: str, implementation: str) -> Tensor:
    y: Tensor = module(implementation).activation_forward(x, up, kind)
    return y.contiguous()


def _backward_over(
    dy: Tensor, gate: Tensor, up: Tensor, kind: ActivationKind, implementation: str
) -> None:
    """d_gate takes the place of up, and d_up that of gate."""
    module(implementation).activation_backward(dy, gate, up, kind, None, (up, gate))


_activation = _library.Operator(
    "activation(Tensor x, Tensor? up, str kind, str implementation) -> Tensor",
    _forward,
    lambda x, up, kind, implementation: x.new_empty(
        x.shape, dtype=x.dtype if up is None else torch.promote_types(x.dtype, up.dtype)
    ),
)
_gradients = _library.Operator(
    "activation_backward(Tensor dy, Tensor x, Tensor? up, str kind, str implementation) -> Tensor[]",
    dispatched("activation_backward"),
    lambda dy, x, up, kind, implementation: [
        t.new_empty(t.shape) for t in (x, up) if t is not None
    ],
)
_gradients_over = _library.Operator(
    "glu_backward_over(Tensor dy, Tensor(a!) gate, Tensor(b!) up, str kind, str implementation) "
    "-> ()",
    _backward_over,
    lambda dy, gate, up, kind, implementation: None,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, up, *ctx.settings = inputs
    ctx.save_for_backward(x, up)


@_library.first_order("activation")
def _gradients_of_saved(ctx: Any, dy: Tensor) -> Any:
    dx, *d_up = _gradients(dy, *ctx.saved_tensors, *ctx.settings)
    needs_x, needs_up, *_ = ctx.needs_input_grad
    return dx if needs_x else None, d_up[0] if needs_up else None, None, None


_differentiable = _activation.differentiable(_save, _gradients_of_saved)


def activation(
    x: Tensor,
    kind: ActivationKind,
    up: Tensor | None = None,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """h(x) or, a gated product, h(x) * up, exact; saves ``x`` and ``up`` as they were given and nothing else.

    dx = dy * h'(x); for a gated product d_gate = dy * up * h'(gate), d_up = dy * h(gate), one kernel each
    way, where torch saves h(gate) too. Without ``up`` and under ``"auto"`` torch's own operator does this
    where there is one; QuickGELU and squared ReLU are eager Python elsewhere and save more, and torch's ReLU,
    sigmoid and tanh save their output.

    Args:
        x: ``[...]``, float16, bfloat16, float32 or float64; may be a strided view, such as half of a packed
            projection.
        kind: which activation.
        up: shape of ``x``; its dtype may differ, the result then has the promoted dtype.
        implementation: see `resolve`.

    Returns:
        ``[...]``, dtype of ``x``; a gated product is contiguous.

    Raises:
        TypeError: ``x`` is not floating point.
    """
    if up is None and not _library.wants_gradient(x):
        return reference.activate(x, kind)  # of integers, too
    check_floating("activation", "x", x)
    if _library.knows_no_operators(x, up) or _library.is_transformed():
        return compiled.activation(x, kind, up)
    if up is None and implementation == "auto" and kind not in _NOT_TORCHS:
        return reference.activate(x, kind)
    if not _library.wants_gradient(x, up):
        resolve(implementation, x, up)
        y = reference.activate(x, kind)
        return y if up is None else y * up
    return differentiable_activation(x, kind, up, implementation)


def differentiable_activation(
    x: Tensor, kind: ActivationKind, up: Tensor | None, implementation: Implementation = "auto"
) -> Tensor:
    """As `activation`, of arguments that are known to fit and of which one asks for a gradient."""
    found: Tensor = _differentiable(x, up, kind, resolve(implementation, x, up))
    return found


def saves_input(kind: ActivationKind) -> bool:
    """Whether torch has one operator for it, whose gradient is computed from its input."""
    return kind not in _NOT_TORCHS


def computed_again(x: Tensor, up: Tensor | None = None, *, kind: ActivationKind) -> Tensor:
    """The bits that `activation` gave for these; no gradient."""
    if up is None and kind not in _NOT_TORCHS:
        return reference.activate(x, kind)
    y: Tensor = _activation(x, up, kind, resolve("auto", x, up))
    return y


def activation_gradients(
    dy: Tensor, sources: tuple[Tensor, ...], kind: ActivationKind, given_away: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of x of h(x), or of gate and up of h(gate) * up; no graph is recorded.

    Args:
        dy: gradient of the value.
        sources: x, or gate and up.
        kind: which activation.
        given_away: checkpoint computed the sources again, for this alone: gradients may take their places.
    """
    gated = len(sources) == 2
    if not gated and kind not in _NOT_TORCHS:
        return (reference.activate_backward(dy, sources[0], kind),)
    chosen = resolve("auto", *sources)
    if gated and given_away and can_be_overwritten(dy, *sources):
        _gradients_over(dy, *sources, kind, chosen)
        return sources[::-1]
    x, up = sources if gated else (sources[0], None)
    return tuple(_gradients(dy, x, up, kind, chosen))


def _codes_fake(
    x: Tensor, kind: ActivationKind, bits: int, implementation: str
) -> tuple[Tensor, Tensor]:
    size = codes_bytes(x.numel(), STEP_TABLES[kind][bits].bits)
    return x.new_empty(x.shape), x.new_empty(size, dtype=torch.uint8)


_codes = _library.Operator(
    "codes_activation(Tensor x, str kind, int bits, str implementation) -> (Tensor, Tensor)",
    dispatched("codes_forward"),
    _codes_fake,
)
_codes_backward = _library.Operator(
    "codes_activation_backward(Tensor dy, Tensor codes, str kind, int bits, ScalarType dtype, "
    "str implementation) -> Tensor",
    dispatched("codes_backward"),
    lambda dy, codes, kind, bits, dtype, implementation: dy.new_empty(dy.shape, dtype=dtype),
)


def _save_codes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, kind, bits, implementation = inputs
    ctx.save_for_backward(output[1])
    ctx.settings = (kind, bits, x.dtype, implementation)


@_library.first_order("codes_activation")
def _gradient_by_codes(ctx: Any, dy: Tensor, *_: None) -> Any:
    dx = _codes_backward(dy, *ctx.saved_tensors, *ctx.settings)
    return dx, None, None, None


_call_codes = _codes.differentiable(_save_codes, _gradient_by_codes)


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
        bits: 1 to 4, of which the kind has a table.
        implementation: see `resolve`.

    Returns:
        ``[...]``, dtype of ``x`` (under autocast too); with the strides of ``x``, or contiguous where that
        has gaps.

    Raises:
        TypeError: ``x`` is not floating point.
    """
    if (
        not _library.wants_gradient(x)
        or _library.knows_no_operators(x)
        or _library.is_transformed()
    ):
        return reference.activate(x, kind)
    check_floating("codes_activation", "x", x)
    chosen = resolve(implementation, x)
    order = _memory_order(x)
    if order is None:
        y: Tensor = _call_codes(x, kind, bits, chosen)
        return y
    # in the order of the memory, as torch's own activations: channels last stay last, and nothing is copied
    y = _call_codes(x.permute(order), kind, bits, chosen)
    return y.permute([order.index(dim) for dim in range(x.dim())])


def _memory_order(x: Tensor) -> list[int] | None:
    """The dimensions of a tensor without gaps as they lie in memory; None where they lie so already, where
    there are gaps, and in a compiler."""
    if x.is_contiguous() or _library.in_compiler():
        return None
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    return order if x.permute(order).is_contiguous() else None
