"""Linears, with or without a low-rank adapter, that save what their input is computed from.

F.linear saves its input, hidden = h(x) or h(gate) * up, for the weight's gradient, beside the x (gate,
up) that the activation saves for its own. Here activation, Linear and adapter are one op that saves
x (gate, up) alone: in backward one elementwise kernel gives their gradients and hidden again.

    low = hidden A^T,    y = hidden W^T + b + s low B^T
    d_low = s dy B,      d_hidden = dy W + d_low A,     d_x = d_hidden h'(x) (or as in `activation`)
    d_W = dy^T hidden,   d_b = sum dy,   d_A = d_low^T hidden,   d_B = s dy^T low

In a block that runs again in backward nobody else reads x (gate, up) then, and results take their places.
Saved: x (gate, up) if W or A trains or h is not the identity, in 8 bits if asked; low, with its rank padded;
W, A and B where d_hidden, d_A or d_B asks for them, as they are given: casts are repeated in backward and
leave no copies.

A batched matmul does the like: under autocast, softmax gives float32 and saves that for its own backward, and
the matmul behind it would cast it to bf16 and save this copy, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.constants import ActivationKind
from lowmem_patch.functional import _library, compiled
from lowmem_patch.functional._implementation import Implementation, check_floating, resolve
from lowmem_patch.functional._ownership import can_be_overwritten, is_checkpoint_packing
from lowmem_patch.functional.eight_bit import stored_matrix
from lowmem_patch.functional.products import (
    IDENTITY,
    LowRank,
    PackedWeight,
    linear_forward,
    linear_of,
    linear_op,
    low_product_op,
    split_packed,
    unpacked,
)
from lowmem_patch.functional.products_backward import (
    linear_backward,
    linear_backward_of_eight_bits,
    linear_backward_op,
    linear_backward_over,
    one_for_each,
)
from lowmem_patch.functional.shared_input import GradientSum, sum_of

_Stored = tuple[Tensor | None, ...] | None  # integers and scales of source and up


def _save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...], stored: _Stored = None
) -> None:
    weight, _, lora_A, lora_B, scale, kind, _, implementation = inputs[3:]
    _, for_source, for_up, for_weight, for_bias, for_A, for_B, *_ = ctx.needs_input_grad
    for_input = for_source or for_up
    sources = inputs[1:3] if stored is None else stored
    if not (for_weight or for_A or (for_input and kind != IDENTITY)):
        sources = (None, None)
    ctx.eight_bits = len(sources) == 4
    ctx.packed, saved_weight = split_packed(weight if for_input else None)
    needs = (for_input, for_weight, for_bias, for_A, for_B)
    adapter = () if lora_A is None else _saved_adapter(needs, lora_A, lora_B, output[1])
    ctx.save_for_backward(*sources, saved_weight, *adapter)
    ctx.settings = (scale, kind, needs, implementation)
    ctx.given_away = kind != IDENTITY and is_checkpoint_packing()
    ctx.sum = _sum_of(inputs)
    # an absent tensor's dtype is never read
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[1:7]]


def _saved_adapter(
    needs: tuple[bool, ...], lora_A: Tensor, lora_B: Tensor, low: Tensor
) -> tuple[Tensor | None, ...]:
    for_input, _, _, for_A, for_B = needs
    reads_B = for_input or for_A or for_B
    return lora_A if for_input else None, lora_B if reads_B else None, low if for_B else None


def _sum_of(inputs: tuple[Any, ...]) -> GradientSum | None:
    _, source, _, _, _, lora_A, _, _, kind, dtype, _ = inputs
    # a gradient in another dtype than the products is a copy, which nothing can be added to
    plain = kind == IDENTITY and lora_A is not None and dtype == source.dtype
    return sum_of(source) if plain else None


@_library.first_order("activation_linear")
def _gradients(ctx: Any, dy: Tensor, *_: None) -> Any:
    split, saved = 4 if ctx.eight_bits else 2, ctx.saved_tensors
    sources, saved = saved[:split], saved[split:]
    if len(saved) == 1:
        saved = (*saved, None, None, None)
    if ctx.packed is not None:
        saved = (unpacked(ctx.packed, dy.dtype), *saved[1:])
    for_input, *for_rest = ctx.settings[2]
    needs = (for_input, for_input and sources[split // 2] is not None, *for_rest)
    if ctx.eight_bits:
        found = linear_backward_of_eight_bits(dy, *sources, ctx.dtypes[0], *saved, *ctx.settings)
        return (None, *one_for_each(found, needs, ctx.dtypes), None, None, None, None)
    saved = (*sources, *saved)
    added_up = ctx.sum if for_input and _library.is_eager(dy, *saved) else None
    first = added_up is None or added_up.returned() is None
    if added_up is not None:
        gradients = linear_backward(dy, *saved, *ctx.settings, added_up=added_up)
    elif ctx.given_away and for_input and can_be_overwritten(dy, *saved[:2]):
        gradients = linear_backward_over(dy, *saved, *ctx.settings)
    else:
        gradients = linear_backward_op(dy, *saved, *ctx.settings)
    found = one_for_each(gradients, needs, ctx.dtypes)
    if not first:
        found = (None, *found[1:])  # it is in what another reader has returned
    return (None, *found, None, None, None, None)


_call_linear: Callable[..., Tensor] = linear_op.differentiable(_save, _gradients)


class _DirectLinear(torch.autograd.Function):
    """The op where no operator knows it: of a packed weight, of sources in 8 bits, or saved first."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        _library.see_undefined(ctx)
        *given, stored, output = arguments
        output = linear_of(*given) if output is None else output
        _save(ctx, tuple(given), output, stored)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (*_gradients(ctx, *gradients), None, None)


_call_directly: Callable[..., Tensor] = _library.direct_call(_DirectLinear)


def _saved_first(*arguments: Any, stored: _Stored) -> Tensor:
    """The op in a block that is run again in backward: it saves, and computes y afterwards.

    Where it is the last to save, torch.utils.checkpoint stops the second run as soon as it has saved
    (`set_checkpoint_early_stop`), and the largest product of the block is not computed again.
    """
    hidden, _, _, weight, bias, lora_A, lora_B, scale, _, dtype, implementation = arguments
    shape, low = (*hidden.shape[:-1], weight.shape[0]), None
    with torch.no_grad():
        if lora_A is not None:
            low = low_product_op(hidden, lora_A, lora_B, dtype, implementation)
        # without memory, and no view, which autograd would not let anybody write into
        y = hidden.new_empty_strided(shape, (0,) * len(shape), dtype=dtype)
    y = _call_directly(*arguments, stored, (y, low))
    with torch.no_grad():
        if _library.is_eager(*arguments) or isinstance(weight, PackedWeight):
            products = (weight, bias, lora_A, lora_B, scale)
            y.data = linear_forward(hidden, *products, dtype, implementation, low)[0]
        else:
            y.data = linear_op(*arguments)[0]
    return y


def _is_run_again(arguments: tuple[Any, ...]) -> bool:
    """Whether a forward runs in backward, on tensors with or without data."""
    return (
        not _library.in_compiler()
        and _library.backward_number() != -1
        and not _library.is_traced()
        and _library.is_plain(*arguments)
        and not _library.is_transformed()
        and not _library.finds_results()
    )


def _in_eight_bits(source: Tensor, up: Tensor | None = None) -> _Stored:
    return *stored_matrix(source), *((None, None) if up is None else stored_matrix(up))


def _linear(
    hidden: Tensor,
    sources: tuple[Tensor, ...],
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    adapter: LowRank | None,
    kind: str,
    compute_dtype: torch.dtype,
    implementation: str,
    stored: _Stored = None,
) -> Tensor:
    packed = isinstance(weight, PackedWeight)
    if packed and not _library.is_eager(hidden, *sources):
        implementation = "reference"  # whose ops are those that a mode sees
    up = sources[1] if len(sources) == 2 else None
    lora_A, lora_B, scale = (None, None, 1.0) if adapter is None else adapter
    arguments = (
        hidden, sources[0], up, weight, bias, lora_A, lora_B, scale, kind, compute_dtype, implementation,
    )  # fmt: skip
    if _library.wants_gradient(*sources, weight, bias, lora_A, lora_B):
        if _is_run_again(arguments):
            return _saved_first(*arguments, stored=stored)
        if packed or stored is not None:
            return _call_directly(*arguments, stored, None)
        return _call_linear(*arguments)
    with torch.no_grad():  # hidden may ask for a gradient that does not flow through here
        result: Tensor = linear_of(*arguments)[0]
    return result


def _runs_plain(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    adapter: LowRank | None,
) -> bool:
    """Whether torch's own functions multiply, and not the operator."""
    if compiled.runs_plain(*sources, weight, bias, *(adapter or ())[:2]):
        return True
    return adapter is not None and compiled.is_short_product(sources[0], weight)


def activation_linear(
    hidden: Tensor,
    sources: tuple[Tensor, ...],
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    kind: ActivationKind,
    compute_dtype: torch.dtype,
    adapter: LowRank | None = None,
    *,
    eight_bits: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """F.linear(h(sources), weight, bias), plus an adapter's product, that saves ``sources`` alone.

    The weights are saved as they are given and cast again in backward, so that autocast leaves no
    low-precision copy of them. Nothing is checked: that would cost as much as a small kernel.

    Args:
        hidden: ``[..., F]``, the value of h(sources[0]) or h(sources[0]) * sources[1]; gradients do not
            flow through it but to ``sources``.
        sources: one or two tensors of the shape of ``hidden``.
        weight: ``[O, F]``.
        bias: ``[O]`` or None.
        kind: which activation.
        compute_dtype: hidden, weights and bias are cast to it.
        adapter: a low-rank adapter beside the Linear.
        eight_bits: save the sources, of one dtype, in 8 bits (`lowmem_patch.functional.eight_bit`).
        implementation: of the recompute; see `resolve`.

    Returns:
        ``[..., O]`` in ``compute_dtype``.
    """
    if isinstance(weight, Tensor) and _runs_plain(sources, weight, bias, adapter):
        again = compiled.activation(sources[0], kind, *sources[1:])
        return compiled.linear(again, weight, bias, compute_dtype, adapter)
    chosen = resolve(implementation, *sources)
    stored = _in_eight_bits(*sources) if eight_bits else None
    return _linear(hidden, sources, weight, bias, adapter, kind, compute_dtype, chosen, stored)


def recast_linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    adapter: LowRank | None = None,
) -> Tensor:
    """F.linear in ``compute_dtype``, plus an adapter's product, that saves what it is given.

    Where `F.linear(x.to(compute_dtype), weight.to(compute_dtype))` would save a copy of both, the
    casts are repeated in backward; the arithmetic and its rounding are the same.

    Args:
        x: ``[..., F]``, any floating dtype.
        weight: ``[O, F]``; a packed one is unpacked again in backward.
        bias: ``[O]`` or None.
        compute_dtype: of the product and of the result.
        adapter: a low-rank adapter beside the Linear.

    Returns:
        ``[..., O]`` in ``compute_dtype``.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: shapes do not fit.
    """
    _check_weights(x, weight, adapter)
    if isinstance(weight, Tensor) and _runs_plain((x,), weight, bias, adapter):
        return compiled.linear(x, weight, bias, compute_dtype, adapter)
    chosen = "reference" if adapter is None else resolve("auto", x, adapter.lora_A, adapter.lora_B)
    return _linear(x, (x,), weight, bias, adapter, IDENTITY, compute_dtype, chosen)


def _check_weights(x: Tensor, weight: Tensor | PackedWeight, adapter: LowRank | None) -> None:
    check_floating("recast_linear", "x", x)
    if not isinstance(weight, PackedWeight):
        check_floating("recast_linear", "weight", weight)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            "recast_linear: weight must be [O, F] for x [..., F], got "
            f"{tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if adapter is None:
        return
    lora_A, lora_B, _ = adapter
    check_floating("recast_linear", "adapter.lora_A", lora_A)
    check_floating("recast_linear", "adapter.lora_B", lora_B)
    rank, shape = lora_B.shape[-1], lora_A.shape
    if shape != (rank, x.shape[-1]) or lora_B.shape != (weight.shape[0], rank):
        raise ValueError(
            f"recast_linear: an adapter beside a weight {tuple(weight.shape)} must be [r, F] and [O, r], "
            f"got {tuple(shape)} and {tuple(lora_B.shape)}"
        )


class _RecastMatmul(_library.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, dtype: torch.dtype) -> Any:
        _library.see_undefined(ctx)
        with _library.without_autocast(left.device.type):
            # three dimensions and a whole operand, as torch's own matmul multiplies and saves them
            right_cast = right.to(dtype).reshape(-1, *right.shape[-2:])
            y = left.to(dtype).reshape(-1, *left.shape[-2:]).bmm(right_cast)
        needs_left, needs_right = ctx.needs_input_grad[:2]
        ctx.save_for_backward(left if needs_right else None, right_cast if needs_left else None)
        ctx.shapes, ctx.dtypes = (left.shape, right.shape), (left.dtype, right.dtype)
        # no view, which autograd would not let anybody write into
        return torch.ops.aten._unsafe_view.default(y, (*left.shape[:-1], right.shape[-1]))

    @staticmethod
    @_library.first_order("recast_matmul")
    def backward(ctx: Any, dy: Tensor) -> Any:
        left, right_cast = ctx.saved_tensors
        rows = dy.reshape(-1, *dy.shape[-2:])
        d_left = d_right = None
        with _library.without_autocast(dy.device.type):
            if right_cast is not None:
                d_left = rows.bmm(right_cast.transpose(1, 2)).view(ctx.shapes[0]).to(ctx.dtypes[0])
            if left is not None:
                again = left.to(dy.dtype).reshape(-1, *left.shape[-2:])
                d_right = again.transpose(1, 2).bmm(rows).view(ctx.shapes[1]).to(ctx.dtypes[1])
        return d_left, d_right, None


def recast_matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left.to(dtype) @ right.to(dtype)`` that saves ``left`` as it is given.

    Args:
        left: ``[..., N, M]``.
        right: ``[..., M, K]``, of the same batch dimensions.
        dtype: of the product and of the result.

    Returns:
        ``[..., N, K]``.

    Raises:
        ValueError: shapes do not fit.
    """
    fits = left.shape[:-2] == right.shape[:-2] and left.shape[-1:] == right.shape[-2:-1]
    if left.dim() < 3 or not fits:
        raise ValueError(
            f"recast_matmul: [..., N, M] and [..., M, K] must share all but the last two dimensions, got "
            f"{tuple(left.shape)} and {tuple(right.shape)}"
        )
    return _RecastMatmul.apply(left, right, dtype)
