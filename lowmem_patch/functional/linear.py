"""A Linear behind an activation that keeps the activation's input instead of its output.

F.linear keeps its input, hidden = h(x) or h(gate) * up, for the weight's gradient. The sources are
kept anyway (by the activation's own backward), so hidden is recomputed from them when the weight's
gradient is due: one elementwise kernel, no matmul.

    d_hidden = dy W,    d_weight = dy^T hidden(sources),    d_bias = sum dy

Saved: the sources (only if the weight needs a gradient), the weight (only if hidden does).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import ActivationKind
from lowmem_patch.functional import _library
from lowmem_patch.functional._checks import check_floating, check_kind
from lowmem_patch.functional._implementation import Implementation, module, resolve

__all__ = ["activation_linear", "kept_linear"]

# the kind of a Linear whose input is kept as it is, in its own dtype
_IDENTITY = "identity"


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """The matmuls below cast on their own; autocast inside an op would contradict its fake."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _forward(
    hidden: Tensor,
    source: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
    compute_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    with _without_autocast(hidden):
        wide_bias = None if bias is None else bias.to(compute_dtype)
        y = F.linear(hidden.to(compute_dtype), weight.to(compute_dtype), wide_bias)
    return y.contiguous()


def _forward_fake(
    hidden: Tensor,
    source: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    kind: ActivationKind,
    compute_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=compute_dtype)


def _backward(
    dy: Tensor,
    source: Tensor | None,
    up: Tensor | None,
    weight: Tensor | None,
    kind: ActivationKind,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    implementation: str,
) -> list[Tensor]:
    rows = dy.reshape(-1, dy.shape[-1])
    gradients = []
    with _without_autocast(dy):
        if weight is not None:
            d_hidden = rows.mm(weight.to(dy.dtype)).to(hidden_dtype)
            gradients.append(d_hidden.view(*dy.shape[:-1], weight.shape[1]))
        if source is not None:
            ops = module(implementation)
            if kind == _IDENTITY:
                hidden = source.to(dy.dtype)
            elif up is None:
                hidden = ops.activate(source, kind, dy.dtype)
            else:
                hidden = ops.glu_forward(source, up, kind, dy.dtype)
            # the order of torch's own mm backward, for equal bits
            d_weight = rows.t().mm(hidden.reshape(-1, hidden.shape[-1]))
            gradients.append(d_weight.to(weight_dtype))
        if bias_dtype is not None:
            gradients.append(rows.sum(0).to(bias_dtype))
    return gradients


def _backward_fake(
    dy: Tensor,
    source: Tensor | None,
    up: Tensor | None,
    weight: Tensor | None,
    kind: ActivationKind,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    implementation: str,
) -> list[Tensor]:
    gradients = []
    if weight is not None:
        gradients.append(dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=hidden_dtype))
    if source is not None:
        gradients.append(dy.new_empty((dy.shape[-1], source.shape[-1]), dtype=weight_dtype))
    if bias_dtype is not None:
        gradients.append(dy.new_empty(dy.shape[-1:], dtype=bias_dtype))
    return gradients


_linear_forward = _library.define(
    "activation_linear(Tensor hidden, Tensor source, Tensor? up, Tensor weight, Tensor? bias, "
    "str kind, ScalarType compute_dtype, str implementation) -> Tensor",
    _forward,
    _forward_fake,
)
_linear_backward = _library.define(
    "activation_linear_backward(Tensor dy, Tensor? source, Tensor? up, Tensor? weight, str kind, "
    "ScalarType hidden_dtype, ScalarType weight_dtype, ScalarType? bias_dtype, "
    "str implementation) -> Tensor[]",
    _backward,
    _backward_fake,
)


class _ActivationLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        direct: bool,
        hidden: Tensor,
        source: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        kind: ActivationKind,
        compute_dtype: torch.dtype,
        implementation: str,
    ) -> Any:
        arguments = (hidden, source, up, weight, bias, kind, compute_dtype, implementation)
        if direct:
            y = _forward(*arguments)
        else:
            with _library.below_autograd():
                y = _linear_forward(*arguments)
        _, needs_hidden, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            source if needs_weight else None,
            up if needs_weight else None,
            weight if needs_hidden else None,
        )
        ctx.dtypes = (
            hidden.dtype,
            weight.dtype,
            bias.dtype if needs_bias and bias is not None else None,
        )
        ctx.kind, ctx.implementation = kind, implementation
        return y

    @staticmethod
    @_library.first_order("activation_linear")
    def backward(ctx: Any, dy: Tensor) -> Any:
        source, up, weight = ctx.saved_tensors
        backward: Any = _backward if _library.is_eager(dy, source, up, weight) else _linear_backward
        found = iter(backward(dy, source, up, weight, ctx.kind, *ctx.dtypes, ctx.implementation))
        _, needs_hidden, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = next(found) if needs_hidden else None
        d_weight = next(found) if needs_weight else None
        d_bias = next(found) if needs_bias else None
        return None, d_hidden, None, None, d_weight, d_bias, None, None, None


_call_linear = _library.attach_autograd(_linear_forward, _ActivationLinear)


def activation_linear(
    hidden: Tensor,
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    kind: ActivationKind,
    compute_dtype: torch.dtype | None = None,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """F.linear(hidden, weight, bias) that keeps ``sources`` instead of ``hidden``.

    The gradient of ``sources`` does not pass through this op: it flows through the node that
    computed ``hidden``. The weight is saved as it is given and cast again in backward, so that
    autocast leaves no low-precision copy of it.

    Args:
        hidden: ``[..., F]``, computed as ``activation(sources[0], kind)`` or ``glu(*sources, kind)``.
        sources: one or two tensors of the shape of ``hidden``.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        kind: which activation.
        compute_dtype: hidden, weight and bias are cast to it; by default autocast's dtype where
            autocast is on, else the dtype of ``hidden``, which the weight must then have.
        implementation: of the recompute; see `resolve`.

    Returns:
        ``[..., O]`` in ``compute_dtype``.

    Raises:
        TypeError: a tensor is not floating point, or dtypes differ and no cast was asked for.
        ValueError: shapes do not fit, or not one or two sources, or unknown ``kind``.
    """
    check_kind("activation_linear", kind)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        check_floating("activation_linear", name, tensor)
    if len(sources) not in (1, 2):
        raise ValueError(f"activation_linear: one or two sources, got {len(sources)}")
    for source in sources:
        check_floating("activation_linear", "a source", source)
        if source.shape != hidden.shape:
            raise ValueError(
                f"activation_linear: sources must have the shape of hidden, {tuple(hidden.shape)}, "
                f"got {tuple(source.shape)}"
            )
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            "activation_linear: weight must be [O, F] for hidden [..., F], got "
            f"{tuple(weight.shape)} for {tuple(hidden.shape)}"
        )
    if compute_dtype is None:
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
            compute_dtype = torch.get_autocast_dtype(device)
        elif weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
            raise TypeError(
                f"activation_linear: hidden is {hidden.dtype}, weight {weight.dtype}, bias "
                f"{None if bias is None else bias.dtype}; give compute_dtype to cast them"
            )
        else:
            compute_dtype = hidden.dtype
    chosen = resolve(implementation, *sources)
    up = sources[1] if len(sources) == 2 else None
    if not _library.wants_gradient(hidden, weight, bias):
        return _forward(hidden, sources[0], up, weight, bias, kind, compute_dtype, chosen)
    y: Tensor = _call_linear(hidden, sources[0], up, weight, bias, kind, compute_dtype, chosen)
    return y


def kept_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype
) -> Tensor:
    """F.linear in ``compute_dtype`` that keeps ``x`` and ``weight`` as they are given.

    Where `F.linear(x.to(compute_dtype), weight.to(compute_dtype))` would keep a copy of both, the
    casts are repeated in backward; the arithmetic and its rounding are the same.

    Args:
        x: ``[..., I]``, any floating dtype.
        weight: ``[O, I]``.
        bias: ``[O]`` or None.
        compute_dtype: of the product and of the result.

    Returns:
        ``[..., O]`` in ``compute_dtype``.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: shapes do not fit.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        check_floating("kept_linear", name, tensor)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            "kept_linear: weight must be [O, I] for x [..., I], got "
            f"{tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if not _library.wants_gradient(x, weight, bias):
        return _forward(x, x, None, weight, bias, _IDENTITY, compute_dtype, "reference")
    y: Tensor = _call_linear(x, x, None, weight, bias, _IDENTITY, compute_dtype, "reference")
    return y
