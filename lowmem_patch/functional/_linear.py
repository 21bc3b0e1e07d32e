"""A Linear, with or without a low-rank adapter, that keeps what its input is computed from.

F.linear keeps its input, hidden = h(x) or h(gate) * up, for the weight's gradient, beside the x (gate,
up) that the activation keeps for its own. Here activation, Linear and adapter are one op that keeps
x (gate, up) alone: in backward one elementwise kernel gives their gradients and hidden again.

    low = hidden A^T,    y = hidden W^T + b + s low B^T
    d_low = s dy B,      d_hidden = dy W + d_low A,     d_x = d_hidden h'(x) (or as in `glu`)
    d_W = dy^T hidden,   d_b = sum dy,   d_A = d_low^T hidden,   d_B = s dy^T low

Saved: x (gate, up) if W or A trains or h is not the identity; low, with its rank padded; W, A and B where
d_hidden, d_A or d_B asks for them, as they are given: casts are repeated in backward and leave no copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import ActivationKind, padded_rank
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import module

__all__ = ["IDENTITY", "call_linear", "linear_backward", "linear_forward", "linear_operator"]

# the kind of a Linear whose input is kept as it is, in its own dtype
IDENTITY = "identity"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # a .to that changes nothing costs as much as a small kernel's launch
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _scaled(scale: float, left: Tensor, right: Tensor) -> Tensor:
    """scale * (left @ right), scaled before it is rounded, in one launch."""
    y = left.new_empty(left.shape[0], right.shape[1])
    return y.addmm_(left, right, beta=0, alpha=scale)  # reads nothing of y


def linear_forward(
    hidden: Tensor,
    source: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor | None,
    raised: Tensor | None,
    scale: float,
    kind: str,
    compute_dtype: torch.dtype,
    implementation: str,
) -> tuple[Tensor, Tensor | None]:
    with _library.without_autocast(hidden.device.type):
        hidden = _cast(hidden, compute_dtype)
        wide_bias = None if bias is None else _cast(bias, compute_dtype)
        wide_weight = _cast(weight, compute_dtype)
        if down is None or raised is None:
            return _product(hidden, wide_weight, wide_bias), None
        rows = hidden.reshape(-1, hidden.shape[-1])
        down, raised = module(implementation).adapter_weights(down, raised, compute_dtype)
        low = F.linear(rows, down)
        # The adapter's product first, to which cuBLAS adds the wide one while it computes: the other
        # way round a second product reads and writes y.
        if wide_bias is None:
            y = _scaled(scale, low, raised.t())
        else:
            y = torch.addmm(wide_bias, low, raised.t(), alpha=scale)
        y.addmm_(rows, wide_weight.t())
    return y.resize_(*hidden.shape[:-1], weight.shape[0]), low


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What F.linear gives, bit for bit, but contiguous and no view, which autograd would not let anybody
    write into: ``x = fc2(h); x += shortcut``."""
    if not hidden.is_contiguous():  # torch multiplies in another order then
        y = F.linear(hidden, weight, bias).contiguous()
        whole: Tensor = torch.ops.aten._unsafe_view.default(y, y.shape)
        return whole
    y = F.linear(hidden.view(-1, hidden.shape[-1]), weight, bias)
    # to the same number of elements: the least that torch does to rows of its own
    return y.resize_(*hidden.shape[:-1], weight.shape[0])


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """As the operator returns it, which has no optional results."""
    y, low = linear_forward(*arguments)
    return y, y.new_empty(0) if low is None else low


def _forward_fake(
    hidden: Tensor,
    source: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor | None,
    raised: Tensor | None,
    scale: float,
    kind: str,
    compute_dtype: torch.dtype,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    y = hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=compute_dtype)
    if down is None:
        return y, y.new_empty(0)
    rows = hidden.numel() // hidden.shape[-1]
    return y, y.new_empty((rows, padded_rank(down.shape[0], compute_dtype)))


def linear_backward(
    dy: Tensor,
    source: Tensor | None,
    up: Tensor | None,
    weight: Tensor | None,
    down: Tensor | None,
    raised: Tensor | None,
    low: Tensor | None,
    scale: float,
    kind: str,
    input_dtype: torch.dtype,
    needs: list[bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    down_dtype: torch.dtype,
    raised_dtype: torch.dtype,
    implementation: str,
) -> list[Tensor]:
    """Gradients of source (and up), weight, bias, down and raised, those that ``needs`` asks for."""
    needs_input, needs_weight, needs_bias, needs_down, needs_raised = needs
    ops: Any = module(implementation)
    dtype = dy.dtype
    rows = dy.reshape(-1, dy.shape[-1])
    gradients: list[Tensor] = []
    with _library.without_autocast(dy.device.type):
        d_low = wide_down = None
        if raised is not None and (needs_input or needs_down):
            first = raised.new_empty((raised.shape[1], 1)) if down is None else down
            wide_down, wide_raised = ops.adapter_weights(first, raised, dtype)
            d_low = _scaled(scale, rows, wide_raised)
        hidden = None
        if needs_input:
            assert weight is not None
            wide = _cast(weight, dtype)
            if d_low is None or wide_down is None or down is None:
                d_hidden = rows.mm(wide)
            else:  # in the order of the forward
                d_hidden = d_low.mm(wide_down).addmm_(rows, wide)
            d_hidden = d_hidden.view(*dy.shape[:-1], weight.shape[1])
            if kind == IDENTITY:
                gradients.append(_cast(d_hidden, input_dtype))
            else:
                assert source is not None
                # hidden takes the place of its gradient, so that the peak is that of a plain backward
                hidden = d_hidden if needs_weight or needs_down else None
                if up is None:
                    gradients.append(ops.activate_backward(d_hidden, source, kind, hidden))
                else:
                    gradients.extend(ops.glu_backward(d_hidden, source, up, kind, hidden))
        if needs_weight or needs_down:
            assert source is not None
            if kind == IDENTITY:
                hidden = _cast(source, dtype)
            elif hidden is None and up is None:
                hidden = ops.activate(source, kind, dtype)
            elif hidden is None:
                hidden = ops.glu_forward(source, up, kind, dtype)
            hidden = hidden.reshape(-1, hidden.shape[-1])
        if needs_weight:
            assert hidden is not None
            # the order of torch's own mm backward, for equal bits
            gradients.append(_cast(rows.t().mm(hidden), weight_dtype))
        if needs_bias:
            gradients.append(_cast(rows.sum(0), bias_dtype))
        if needs_down:
            assert d_low is not None and hidden is not None and raised is not None
            d_down = d_low.t().mm(hidden)
            if d_down.shape[0] != raised.shape[1]:
                d_down = d_down[: raised.shape[1]].contiguous()
            gradients.append(_cast(d_down, down_dtype))
        if needs_raised:
            assert low is not None and raised is not None
            d_raised = _scaled(scale, rows.t(), low)
            if d_raised.shape != raised.shape:
                d_raised = d_raised[:, : raised.shape[1]].contiguous()
            gradients.append(_cast(d_raised, raised_dtype))
    return gradients


def _backward_fake(
    dy: Tensor,
    source: Tensor | None,
    up: Tensor | None,
    weight: Tensor | None,
    down: Tensor | None,
    raised: Tensor | None,
    low: Tensor | None,
    scale: float,
    kind: str,
    input_dtype: torch.dtype,
    needs: list[bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    down_dtype: torch.dtype,
    raised_dtype: torch.dtype,
    implementation: str,
) -> list[Tensor]:
    needs_input, needs_weight, needs_bias, needs_down, needs_raised = needs
    outputs = dy.shape[-1]
    gradients = []
    if needs_input and kind == IDENTITY:
        assert weight is not None
        gradients.append(dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=input_dtype))
    elif needs_input:
        assert source is not None
        gradients.extend(t.new_empty(t.shape) for t in (source, up) if t is not None)
    features = source.shape[-1] if source is not None else 0
    if needs_weight:
        gradients.append(dy.new_empty((outputs, features), dtype=weight_dtype))
    if needs_bias:
        gradients.append(dy.new_empty((outputs,), dtype=bias_dtype))
    if needs_down:
        assert raised is not None
        gradients.append(dy.new_empty((raised.shape[1], features), dtype=down_dtype))
    if needs_raised:
        assert raised is not None
        gradients.append(dy.new_empty((outputs, raised.shape[1]), dtype=raised_dtype))
    return gradients


linear_operator = _library.define(
    "activation_linear(Tensor hidden, Tensor source, Tensor? up, Tensor weight, Tensor? bias, "
    "Tensor? down, Tensor? raised, float scale, str kind, ScalarType compute_dtype, "
    "str implementation) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_linear_backward = _library.define(
    "activation_linear_backward(Tensor dy, Tensor? source, Tensor? up, Tensor? weight, "
    "Tensor? down, Tensor? raised, Tensor? low, float scale, str kind, ScalarType input_dtype, "
    "bool[] needs, ScalarType weight_dtype, ScalarType bias_dtype, ScalarType down_dtype, "
    "ScalarType raised_dtype, str implementation) -> Tensor[]",
    linear_backward,
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
        down: Tensor | None,
        raised: Tensor | None,
        scale: float,
        kind: ActivationKind,
        compute_dtype: torch.dtype,
        implementation: str,
    ) -> Any:
        arguments = (
            hidden, source, up, weight, bias, down, raised, scale, kind, compute_dtype, implementation,
        )  # fmt: skip
        if direct:
            y, low = linear_forward(*arguments)
        else:
            with _library.below_autograd():
                y, low = linear_operator(*arguments)
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(low)
        _, _, for_source, for_up, for_weight, for_bias, for_down, for_raised, *_ = (
            ctx.needs_input_grad
        )
        for_input = for_source or for_up
        keeps = for_weight or for_down or (for_input and kind != IDENTITY)
        ctx.save_for_backward(
            source if keeps else None,
            up if keeps else None,
            weight if for_input else None,
            down if for_input else None,
            raised if for_input or for_down or for_raised else None,
            low if for_raised else None,
        )
        ctx.needs = [for_input, for_weight, for_bias, for_down, for_raised]
        ctx.settings = (scale, kind, source.dtype)
        # an absent vector's dtype is never read
        ctx.dtypes = [(weight if t is None else t).dtype for t in (weight, bias, down, raised)]
        ctx.implementation = implementation
        return y if direct else (y, low)

    @staticmethod
    @_library.first_order("activation_linear")
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        if dy is None:
            return (None,) * 12
        saved = ctx.saved_tensors
        backward: Any = linear_backward if _library.is_eager(dy, *saved) else _linear_backward
        found = iter(
            backward(dy, *saved, *ctx.settings, ctx.needs, *ctx.dtypes, ctx.implementation)
        )
        for_input, for_weight, for_bias, for_down, for_raised = ctx.needs
        d_source = next(found) if for_input else None
        d_up = next(found) if for_input and saved[1] is not None else None
        rest = (next(found) if n else None for n in (for_weight, for_bias, for_down, for_raised))
        return (None, None, d_source, d_up, *rest, None, None, None, None)


call_linear = _library.attach_autograd(linear_operator, _ActivationLinear)
