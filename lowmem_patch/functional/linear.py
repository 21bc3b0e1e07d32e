"""Linears, with or without a low-rank adapter, that save what their input is computed from.

F.linear saves its input, hidden = h(x) or h(gate) * up, for the weight's gradient, beside the x (gate,
up) that the activation saves for its own. Here activation, Linear and adapter are one op that saves
x (gate, up) alone: in backward one elementwise kernel gives their gradients and hidden again.

    low = hidden A^T,    y = hidden W^T + b + s low B^T
    d_low = s dy B,      d_hidden = dy W + d_low A,     d_x = d_hidden h'(x) (or as in `glu`)
    d_W = dy^T hidden,   d_b = sum dy,   d_A = d_low^T hidden,   d_B = s dy^T low

Saved: x (gate, up) if W or A trains or h is not the identity; low, with its rank padded; W, A and B where
d_hidden, d_A or d_B asks for them, as they are given: casts are repeated in backward and leave no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import ActivationKind, padded_rank
from lowmem_patch.functional import _library, compiled, sharded
from lowmem_patch.functional._checks import check_floating, check_kind
from lowmem_patch.functional._implementation import Implementation, module, resolve
from lowmem_patch.reference import cast

__all__ = [
    "IDENTITY",
    "LowRank",
    "activation_linear",
    "linear_backward",
    "linear_forward",
    "one_for_each",
    "recast_linear",
]

# the kind of a Linear whose input is saved as it is, in its own dtype
IDENTITY = "identity"


class LowRank(NamedTuple):
    """An adapter beside a Linear: ``scale * (hidden @ lora_A.T) @ lora_B.T`` is added to its output.

    Attributes:
        lora_A: ``[r, F]``.
        lora_B: ``[O, r]``.
        scale: the field's alpha / r.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float


def _scaled(scale: float, left: Tensor, right: Tensor) -> Tensor:
    """scale * (left @ right), scaled before it is rounded, in one launch."""
    y = left.new_empty(left.shape[0], right.shape[1])
    return y.addmm_(left, right, beta=0, alpha=scale)  # reads nothing of y


def linear_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor, float] | None,
    compute_dtype: torch.dtype,
    implementation: str = "reference",
) -> tuple[Tensor, Tensor | None]:
    """y ``[..., O]`` and, with an adapter, low ``[rows, R]``, both in ``compute_dtype``."""
    outputs = weight.shape[0]
    with _library.without_autocast(hidden.device.type):
        hidden, weight = cast(hidden, compute_dtype), cast(weight, compute_dtype)
        bias = None if bias is None else cast(bias, compute_dtype)
        if adapter is None:
            return _product(hidden, weight, bias), None
        rows = hidden.reshape(-1, hidden.shape[-1])
        ops = module(implementation)
        lora_A, lora_B = ops.adapter_weights(adapter[0], adapter[1], compute_dtype)
        low = F.linear(rows, lora_A)
        # The adapter's product first, to which cuBLAS adds the large one while it computes: the other
        # way round a second product reads and writes y.
        if bias is None:
            y = _scaled(adapter[2], low, lora_B.t())
        else:
            y = torch.addmm(bias, low, lora_B.t(), alpha=adapter[2])
        y.addmm_(rows, weight.t())
    return y.resize_(*hidden.shape[:-1], outputs), low


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


def _forward(
    hidden: Tensor,
    source: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    scale: float,
    kind: str,
    compute_dtype: torch.dtype,
    implementation: str,
) -> tuple[Tensor, Tensor | None]:
    adapter = None if lora_A is None or lora_B is None else (lora_A, lora_B, scale)
    return linear_forward(hidden, weight, bias, adapter, compute_dtype, implementation)


def _forward_fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    _, _, weight, _, lora_A, *_, compute_dtype, _ = rest
    y = hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=compute_dtype)
    if lora_A is None:
        return y, None
    rows = hidden.numel() // hidden.shape[-1]
    return y, y.new_empty((rows, padded_rank(lora_A.shape[0], compute_dtype)))


def _low_gradient(
    ops: Any, rows: Tensor, lora_A: Tensor | None, lora_B: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """d_low and the padded A, which is not read where ``lora_A`` is None."""
    first = lora_B.new_empty((lora_B.shape[1], 1)) if lora_A is None else lora_A
    padded_A, padded_B = ops.adapter_weights(first, lora_B, rows.dtype)
    return _scaled(scale, rows, padded_B), padded_A


def _hidden_gradient(
    dy: Tensor, rows: Tensor, weight: Tensor, d_low: Tensor | None, padded_A: Tensor | None
) -> Tensor:
    weight = cast(weight, dy.dtype)
    if d_low is None or padded_A is None:
        d_hidden = rows.mm(weight)
    else:  # in the order of the forward
        d_hidden = d_low.mm(padded_A).addmm_(rows, weight)
    return d_hidden.view(*dy.shape[:-1], weight.shape[1])


def _source_gradients(
    ops: Any,
    d_hidden: Tensor,
    source: Any,
    up: Tensor | None,
    kind: str,
    hidden: Tensor | None,
) -> list[Tensor]:
    """The gradients of source and up; h(source) (or h(source) * up) goes into ``hidden``, where given."""
    if kind == IDENTITY:
        return [d_hidden]
    if up is None:
        return [ops.activate_backward(d_hidden, source, kind, hidden)]
    return [*ops.glu_backward(d_hidden, source, up, kind, hidden)]


def _hidden(ops: Any, source: Any, up: Tensor | None, kind: str, dtype: torch.dtype) -> Tensor:
    """The Linear's input, computed again."""
    if kind == IDENTITY:
        return cast(source, dtype)
    y: Tensor = (
        ops.activate(source, kind, dtype)
        if up is None
        else ops.glu_forward(source, up, kind, dtype)
    )
    return y


def _without_padding(gradient: Tensor, dim: int, lora_B: Tensor) -> Tensor:
    rank = lora_B.shape[1]
    if gradient.shape[dim] == rank:
        return gradient
    return gradient.narrow(dim, 0, rank).contiguous()


def linear_backward(
    dy: Tensor,
    source: Tensor | None,
    up: Tensor | None,
    weight: Any,
    lora_A: Tensor | None,
    lora_B: Any,
    low: Any,
    scale: float,
    kind: str,
    needs: Sequence[bool],
    implementation: str,
) -> list[Tensor]:
    """Gradients of source (and up), weight, bias, lora_A and lora_B, those that ``needs`` asks for.

    They have the dtype of ``dy``, or of source and up behind an activation. What is not read may be None.
    """
    needs_input, needs_weight, needs_bias, needs_A, needs_B = needs
    ops: Any = module(implementation)
    rows = dy.reshape(-1, dy.shape[-1])
    gradients: list[Tensor] = []
    hidden: Any = None
    d_low: Any = None
    padded_A: Any = None
    with _library.without_autocast(dy.device.type):
        if lora_B is not None and (needs_input or needs_A):
            d_low, padded_A = _low_gradient(ops, rows, lora_A, lora_B, scale)
        if needs_input:
            d_hidden = _hidden_gradient(dy, rows, weight, d_low, padded_A)
            if kind != IDENTITY and (needs_weight or needs_A):
                hidden = d_hidden  # takes the place of its gradient: the peak of a plain backward
            gradients += _source_gradients(ops, d_hidden, source, up, kind, hidden)
        if needs_weight or needs_A:
            if hidden is None:
                hidden = _hidden(ops, source, up, kind, dy.dtype)
            hidden = hidden.reshape(-1, hidden.shape[-1])
        if needs_weight:  # the order of torch's own mm backward, for equal bits
            gradients.append(rows.t().mm(hidden))
        if needs_bias:
            gradients.append(rows.sum(0))
        if needs_A:
            gradients.append(_without_padding(d_low.t().mm(hidden), 0, lora_B))
        if needs_B:
            gradients.append(_without_padding(_scaled(scale, rows.t(), low), 1, lora_B))
    return gradients


def _backward_fake(dy: Tensor, *rest: Any) -> list[Tensor]:
    source, up, weight, _, lora_B, _, _, kind, needs, _ = rest
    needs_input, *needs_weights = needs
    gradients = []
    if needs_input and kind == IDENTITY:
        gradients.append(dy.new_empty((*dy.shape[:-1], weight.shape[1])))
    elif needs_input:
        gradients.extend(t.new_empty(t.shape) for t in (source, up) if t is not None)
    outputs, rank = dy.shape[-1], 0 if lora_B is None else lora_B.shape[1]
    features = 0 if source is None else source.shape[-1]
    shapes = ((outputs, features), (outputs,), (rank, features), (outputs, rank))
    return gradients + [
        dy.new_empty(shape) for shape, need in zip(shapes, needs_weights, strict=True) if need
    ]


_linear_op = _library.Operator(
    "activation_linear(Tensor hidden, Tensor source, Tensor? up, Tensor weight, Tensor? bias, "
    "Tensor? lora_A, Tensor? lora_B, float scale, str kind, ScalarType compute_dtype, "
    "str implementation) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_linear_backward = _library.Operator(
    "activation_linear_backward(Tensor dy, Tensor? source, Tensor? up, Tensor? weight, "
    "Tensor? lora_A, Tensor? lora_B, Tensor? low, float scale, str kind, "
    "bool[] needs, str implementation) -> Tensor[]",
    linear_backward,
    _backward_fake,
)


def one_for_each(
    found: Iterable[Tensor], needs: Iterable[bool], dtypes: Iterable[torch.dtype]
) -> tuple[Any, ...]:
    """The gradients that ``needs`` asked for, each in its dtype, and None for each of the others."""
    gradients = iter(found)
    pairs = zip(needs, dtypes, strict=True)
    return tuple(cast(next(gradients), dtype) if need else None for need, dtype in pairs)


class _ActivationLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output = _forward(*arguments)
        _ActivationLinear.save(ctx, arguments, output)
        return output[0]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, source, up, weight, _, lora_A, lora_B, scale, kind, _, implementation = inputs
        _, for_source, for_up, for_weight, for_bias, for_A, for_B, *_ = ctx.needs_input_grad
        for_input = for_source or for_up
        for_hidden = for_weight or for_A or (for_input and kind != IDENTITY)
        ctx.save_for_backward(
            *((source, up) if for_hidden else (None, None)),
            *((weight, lora_A) if for_input else (None, None)),
            lora_B if for_input or for_A or for_B else None,
            output[1] if for_B else None,
        )
        ctx.needs = (for_input, for_weight, for_bias, for_A, for_B)
        ctx.settings = (scale, kind, ctx.needs, implementation)
        # an absent tensor's dtype is never read
        ctx.dtypes = [(weight if t is None else t).dtype for t in inputs[1:7]]

    @staticmethod
    @_library.first_order("activation_linear")
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        if dy is None:
            return (None,) * 11
        saved = ctx.saved_tensors
        for_input, *for_rest = ctx.needs
        needs = (for_input, for_input and saved[1] is not None, *for_rest)
        found = one_for_each(_linear_backward(dy, *saved, *ctx.settings), needs, ctx.dtypes)
        return (None, *found, None, None, None, None)


_call_linear = _linear_op.differentiable(_ActivationLinear)


def _linear(
    hidden: Tensor,
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    adapter: LowRank | None,
    kind: str,
    compute_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    up = sources[1] if len(sources) == 2 else None
    lora_A, lora_B, scale = (None, None, 1.0) if adapter is None else adapter
    arguments = (
        hidden, sources[0], up, weight, bias, lora_A, lora_B, scale, kind, compute_dtype, implementation,
    )  # fmt: skip
    if _library.wants_gradient(*sources, weight, bias, lora_A, lora_B):
        y: Tensor = _call_linear(*arguments)
        return y
    with torch.no_grad():  # hidden may ask for a gradient that does not flow through here
        result: Tensor = _linear_op(*arguments)[0]
    return result


def _compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype in which F.linear would compute; it is an error where F.linear would raise one."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise TypeError(
            f"activation_linear: hidden is {hidden.dtype}, weight {weight.dtype}, bias "
            f"{None if bias is None else bias.dtype}; give compute_dtype to cast them"
        )
    return hidden.dtype


def activation_linear(
    hidden: Tensor,
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    kind: ActivationKind,
    compute_dtype: torch.dtype | None = None,
    adapter: LowRank | None = None,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """F.linear(h(sources), weight, bias), plus an adapter's product, that saves ``sources`` alone.

    The weights are saved as they are given and cast again in backward, so that autocast leaves no
    low-precision copy of them.

    Args:
        hidden: ``[..., F]``, the value of h(sources[0]) or h(sources[0]) * sources[1]; gradients do not
            flow through it but to ``sources``.
        sources: one or two tensors of the shape of ``hidden``.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        kind: which activation.
        compute_dtype: hidden, weights and bias are cast to it; by default autocast's dtype where
            autocast is on, else the dtype of ``hidden``, which the weight must then have.
        adapter: a low-rank adapter beside the Linear.
        implementation: of the recompute; see `resolve`.

    Returns:
        ``[..., O]`` in ``compute_dtype``.

    Raises:
        TypeError: a tensor is not floating point, or dtypes differ and no cast was asked for.
        ValueError: shapes do not fit, or not one or two sources, or unknown ``kind``.
    """
    check_kind("activation_linear", kind)
    if len(sources) not in (1, 2):
        raise ValueError(f"activation_linear: one or two sources, got {len(sources)}")
    for source in sources:
        check_floating("activation_linear", "a source", source)
        if source.shape != hidden.shape:
            raise ValueError(
                f"activation_linear: sources must have the shape of hidden, {tuple(hidden.shape)}, "
                f"got {tuple(source.shape)}"
            )
    _check_weights("activation_linear", "hidden", hidden, weight, adapter)
    if compute_dtype is None:
        compute_dtype = _compute_dtype(hidden, weight, bias)
    if sharded.is_sharded(*sources, weight, bias, *(adapter or ())[:2]):
        if len(sources) == 1:
            again = compiled.activation(sources[0], kind)
        else:
            again = compiled.glu(sources[0], sources[1], kind)
        return sharded.linear(again, weight, bias, compute_dtype, adapter)
    chosen = resolve(implementation, *sources)
    return _linear(hidden, sources, weight, bias, adapter, kind, compute_dtype, chosen)


def recast_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    adapter: LowRank | None = None,
) -> Tensor:
    """F.linear in ``compute_dtype``, plus an adapter's product, that saves what it is given.

    Where `F.linear(x.to(compute_dtype), weight.to(compute_dtype))` would save a copy of both, the
    casts are repeated in backward; the arithmetic and its rounding are the same.

    Args:
        x: ``[..., F]``, any floating dtype.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        compute_dtype: of the product and of the result.
        adapter: a low-rank adapter beside the Linear.

    Returns:
        ``[..., O]`` in ``compute_dtype``.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: shapes do not fit.
    """
    _check_weights("recast_linear", "x", x, weight, adapter)
    if sharded.is_sharded(x, weight, bias, *(adapter or ())[:2]):
        return sharded.linear(x, weight, bias, compute_dtype, adapter)
    chosen = "reference" if adapter is None else resolve("auto", x, adapter.lora_A, adapter.lora_B)
    return _linear(x, (x,), weight, bias, adapter, IDENTITY, compute_dtype, chosen)


def _check_weights(
    operator: str, name: str, x: Tensor, weight: Tensor, adapter: LowRank | None
) -> None:
    check_floating(operator, name, x)
    check_floating(operator, "weight", weight)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{operator}: weight must be [O, F] for {name} [..., F], got "
            f"{tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if adapter is None:
        return
    lora_A, lora_B, _ = adapter
    check_floating(operator, "adapter.lora_A", lora_A)
    check_floating(operator, "adapter.lora_B", lora_B)
    rank, shape = lora_B.shape[-1], lora_A.shape
    if shape != (rank, x.shape[-1]) or lora_B.shape != (weight.shape[0], rank):
        raise ValueError(
            f"{operator}: an adapter beside a weight {tuple(weight.shape)} must be [r, F] and [O, r], "
            f"got {tuple(shape)} and {tuple(lora_B.shape)}"
        )
