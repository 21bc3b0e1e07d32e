"""Exact activations and gated products that save their inputs and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import ActivationKind
from lowmem_patch.functional import _library, compiled, sharded
from lowmem_patch.functional._checks import check_floating, check_kind
from lowmem_patch.functional._implementation import Implementation, dispatched, module, resolve
from lowmem_patch.functional._ownership import can_be_overwritten

# torch has no operator of its own for the first two, and its operators save the output of the others
_OWN_OPERATOR = ("quick_gelu", "relu_squared", "relu", "sigmoid", "tanh")


def _activation_forward(x: Tensor, kind: ActivationKind, implementation: str) -> Tensor:
    y: Tensor = module(implementation).activate(x, kind)
    return y.contiguous()


_activation = _library.Operator(
    "activation(Tensor x, str kind, str implementation) -> Tensor",
    _activation_forward,
    lambda x, kind, implementation: x.new_empty(x.shape),
)
_activation_gradient = _library.Operator(
    "activation_backward(Tensor dy, Tensor x, str kind, str implementation) -> Tensor",
    lambda *arguments: module(arguments[-1]).activate_backward(*arguments[:-1]).contiguous(),
    lambda dy, x, kind, implementation: x.new_empty(x.shape),
)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _Activation.save(ctx, arguments)
        return _activation_forward(*arguments)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
        x, *ctx.settings = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @_library.first_order("activation")
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _activation_gradient(dy, *ctx.saved_tensors, *ctx.settings), None, None


_call_activation = _activation.differentiable(_Activation)


def activation(
    x: Tensor, kind: ActivationKind, *, implementation: Implementation = "auto"
) -> Tensor:
    """h(x), exact; saves ``x`` and nothing else.

    Under ``"auto"`` torch's own operator does this where there is one; QuickGELU and squared ReLU are
    eager Python elsewhere and save more, and torch's ReLU, sigmoid and tanh save their output.

    Args:
        x: ``[...]``, float16, bfloat16, float32 or float64.
        kind: which activation.
        implementation: see `resolve`.

    Returns:
        ``[...]``, dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: unknown ``kind``.
    """
    check_kind("activation", kind)
    check_floating("activation", "x", x)
    if sharded.is_sharded(x):
        return compiled.activation(x, kind)
    if implementation == "auto" and kind not in _OWN_OPERATOR:
        return reference.activate(x, kind)
    chosen = resolve(implementation, x)
    if not _library.wants_gradient(x):
        return reference.activate(x, kind)
    y: Tensor = _call_activation(x, kind, chosen)
    return y


_glu = _library.Operator(
    "glu(Tensor gate, Tensor up, str kind, str implementation) -> Tensor",
    dispatched("glu_forward"),
    lambda gate, up, kind, implementation: gate.new_empty(
        gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype)
    ),
)
_glu_gradient = _library.Operator(
    "glu_backward(Tensor dy, Tensor gate, Tensor up, str kind, str implementation) "
    "-> (Tensor, Tensor)",
    dispatched("glu_backward"),
    lambda dy, gate, up, kind, implementation: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)


def _glu_backward_over(
    dy: Tensor, gate: Tensor, up: Tensor, kind: ActivationKind, implementation: str
) -> None:
    """d_gate takes the place of up, and d_up that of gate."""
    module(implementation).glu_backward(dy, gate, up, kind, None, (up, gate))


_glu_gradient_over = _library.Operator(
    "glu_backward_over(Tensor dy, Tensor(a!) gate, Tensor(b!) up, str kind, str implementation) "
    "-> ()",
    _glu_backward_over,
    lambda dy, gate, up, kind, implementation: None,
)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _Glu.save(ctx, arguments)
        y: Tensor = _glu.implementation(*arguments)
        return y

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
        gate, up, *ctx.settings = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    @_library.first_order("glu")
    def backward(ctx: Any, dy: Tensor) -> Any:
        d_gate, d_up = _glu_gradient(dy, *ctx.saved_tensors, *ctx.settings)
        needs_gate, needs_up, *_ = ctx.needs_input_grad
        return d_gate if needs_gate else None, d_up if needs_up else None, None, None


_call_glu = _glu.differentiable(_Glu)


def glu(
    gate: Tensor, up: Tensor, kind: ActivationKind, *, implementation: Implementation = "auto"
) -> Tensor:
    """h(gate) * up, exact; saves ``gate`` and ``up`` as they were given and nothing else.

    d_gate = dy * up * h'(gate), d_up = dy * h(gate); one kernel each way. Torch saves h(gate) too.

    Args:
        gate: ``[..., F]``; may be a strided view, such as half of a packed projection.
        up: shape of ``gate``; its dtype may differ, the result then has the promoted dtype.
        kind: which activation.
        implementation: see `resolve`.

    Returns:
        ``[..., F]``, contiguous.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: shapes differ, or unknown ``kind``.
    """
    check_kind("glu", kind)
    check_floating("glu", "gate", gate)
    check_floating("glu", "up", up)
    if gate.shape != up.shape:
        raise ValueError(
            f"glu: gate and up must have the same shape, got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    if sharded.is_sharded(gate, up):
        return compiled.glu(gate, up, kind)
    chosen = resolve(implementation, gate, up)
    if not _library.wants_gradient(gate, up):
        return reference.activate(gate, kind) * up
    y: Tensor = _call_glu(gate, up, kind, chosen)
    return y


def computed_again(sources: tuple[Tensor, Tensor | None], kind: ActivationKind) -> Tensor:
    """The bits that `activation` or, with two sources, `glu` gave for these sources; no gradient."""
    x, up = sources
    chosen = resolve("auto", x, up)
    if up is not None:
        y: Tensor = _glu(x, up, kind, chosen)
        return y
    if kind in _OWN_OPERATOR:
        y = _activation(x, kind, chosen)
        return y
    return reference.activate(x, kind)


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
    chosen = resolve("auto", *sources)
    if len(sources) == 2:
        if given_away and can_be_overwritten(dy, *sources):
            _glu_gradient_over(dy, *sources, kind, chosen)
            return sources[::-1]
        d_gate, d_up = _glu_gradient(dy, *sources, kind, chosen)
        return d_gate, d_up
    if kind in _OWN_OPERATOR:
        return (_activation_gradient(dy, *sources, kind, chosen),)
    return (reference.activate_backward(dy, sources[0], kind),)
