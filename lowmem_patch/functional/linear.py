"""Linears, with or without a low-rank adapter, that keep what their input is computed from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowmem_patch.constants import ActivationKind
from lowmem_patch.functional import _library, compiled, sharded
from lowmem_patch.functional._checks import check_floating, check_kind
from lowmem_patch.functional._implementation import Implementation, resolve
from lowmem_patch.functional._linear import IDENTITY, call_linear, linear_forward, linear_operator

__all__ = ["LowRank", "activation_linear", "kept_linear"]


class LowRank(NamedTuple):
    """An adapter beside a Linear: ``scale * (hidden @ down.T) @ up.T`` is added to its output.

    Attributes:
        down: A, ``[r, F]``.
        up: B, ``[O, r]``.
        scale: the field's alpha / r.
    """

    down: Tensor
    up: Tensor
    scale: float


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
    down, raised, scale = (None, None, 1.0) if adapter is None else adapter
    arguments = (
        hidden, sources[0], up, weight, bias, down, raised, scale, kind, compute_dtype, implementation,
    )  # fmt: skip
    if _library.wants_gradient(*sources, weight, bias, down, raised):
        y: Tensor = call_linear(*arguments)
        return y
    forward = linear_forward if _library.is_eager(*arguments) else linear_operator
    with torch.no_grad():  # hidden may ask for a gradient that does not flow through here
        result: Tensor = forward(*arguments)[0]
    return result


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
    """F.linear(h(sources), weight, bias), plus an adapter's product, that keeps ``sources`` alone.

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
    if sharded.is_sharded(*sources, weight, bias, *(adapter or ())[:2]):
        if len(sources) == 1:
            again = compiled.activation(sources[0], kind)
        else:
            again = compiled.glu(sources[0], sources[1], kind)
        return sharded.linear(again, weight, bias, compute_dtype, adapter)
    chosen = resolve(implementation, *sources)
    return _linear(hidden, sources, weight, bias, adapter, kind, compute_dtype, chosen)


def kept_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    adapter: LowRank | None = None,
) -> Tensor:
    """F.linear in ``compute_dtype``, plus an adapter's product, that keeps what it is given.

    Where `F.linear(x.to(compute_dtype), weight.to(compute_dtype))` would keep a copy of both, the
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
    _check_weights("kept_linear", "x", x, weight, adapter)
    if sharded.is_sharded(x, weight, bias, *(adapter or ())[:2]):
        return sharded.linear(x, weight, bias, compute_dtype, adapter)
    chosen = "reference" if adapter is None else resolve("auto", x, adapter.down, adapter.up)
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
    down, up = adapter.down, adapter.up
    check_floating(operator, "adapter.down", down)
    check_floating(operator, "adapter.up", up)
    if down.shape != (up.shape[-1], x.shape[-1]) or up.shape != (weight.shape[0], down.shape[0]):
        raise ValueError(
            f"{operator}: an adapter beside a weight {tuple(weight.shape)} must be [r, F] and [O, r], "
            f"got {tuple(down.shape)} and {tuple(up.shape)}"
        )
