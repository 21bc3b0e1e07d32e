"""The rotary position embedding in one pass each way.

For each pair (x1, x2) of columns that turn, y1 = x1 c1 - x2 s1 and y2 = x2 c2 + x1 s2; the gradient is
the transpose of that, so one op with a direction serves forward, backward and what comes behind. Saved: cos
and sin, as in the framework's own formula, which takes five passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import _library
from lowmem_patch.functional._checks import check_floating
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve


def _rotate_fake(x: Tensor, *rest: Any) -> Tensor:
    *_, strides, out_dtype, _ = rest
    if strides is None:
        return torch.empty_like(x, dtype=out_dtype)
    return torch.empty_strided(x.shape, strides, dtype=out_dtype, device=x.device)


_rotary = _library.Operator(
    "rotary(Tensor x, Tensor cos, Tensor sin, int heads_dim, str direction, SymInt[]? strides, "
    "ScalarType out_dtype, str implementation) -> Tensor",
    dispatched("rotate"),
    _rotate_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, heads_dim, direction, _, _, implementation = inputs
    ctx.save_for_backward(cos, sin)
    # the gradient has the layout of x, whatever that of dy, so that views of it stay free
    back = "transposed" if direction == "forward" else "forward"
    ctx.settings = (heads_dim, back, output.stride(), x.dtype, implementation)


def _gradient(ctx: Any, dy: Tensor | None) -> Any:
    dx = None if dy is None else _apply(dy, *ctx.saved_tensors, *ctx.settings)
    return dx, *(None,) * 7


_call_rotary = _rotary.differentiable(_save, _gradient)


def _apply(x: Tensor, *rest: Any) -> Tensor:
    records = _library.wants_gradient(x) or _library.in_forward_mode()
    y: Tensor = (_call_rotary if records else _rotary)(x, *rest)
    return y


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int = 1,
    out_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] | None = None,
    *,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by the angles of their positions; saves ``cos`` and ``sin`` alone.

    q' = q cos + rotate_half(q) sin on the first R columns, the others as they are, with
    rotate_half((x1, x2)) = (-x2, x1). Products are float32 inside (float64 for float64), whatever
    autocast says, and rounded once. It can be differentiated any number of times, by q and k.

    Args:
        q: ``[B, H, S, D]`` or, with ``heads_dim`` 2, ``[B, S, H, D]``, in any strides.
        k: the same, with its own number of heads.
        cos, sin: ``[B or 1, S, R]``, R even and at most D, in any strides, without a gradient; their dtype
            may differ from that of ``q``, and their halves from each other.
        heads_dim: 1 or 2.
        out_dtype: dtype of the results, or of each, by default that of ``q`` and that of ``k``; float64 for
            these alone.
        implementation: see `resolve`.

    Returns:
        q' and k' in the strides of ``torch.empty_like(q)`` and ``torch.empty_like(k)``, as are the
        gradients; contiguous where columns would not lie side by side, which fused attention refuses.

    Raises:
        TypeError: q or k is not floating point.
    """
    for_q, for_k = out_dtype if isinstance(out_dtype, tuple) else (out_dtype, out_dtype)
    for name, x in (("q", q), ("k", k)):
        check_floating("rotary_embedding", name, x)
    return (
        turned(q, cos, sin, heads_dim, for_q, implementation=implementation),
        turned(k, cos, sin, heads_dim, for_k, implementation=implementation),
    )


def turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int = 1,
    out_dtype: torch.dtype | None = None,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """What `rotary_embedding` makes of one of its tensors, with its arguments.

    Args:
        x: as ``q`` there.
        out_dtype: of the result.

    Returns:
        x' in the strides that q' has there.

    Raises:
        TypeError: x is not floating point.
    """
    check_floating("rotary_embedding", "x", x)
    result_dtype = x.dtype if out_dtype is None else out_dtype
    if x.stride(-1) != 1 and torch.empty_like(x, device="meta").stride(-1) != 1:
        x = x.contiguous()
    chosen = resolve(implementation, x, cos, sin)
    return _apply(x, cos, sin, heads_dim, "forward", None, result_dtype, chosen)


def turned_back(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    strides: tuple[int, ...],
    out_dtype: torch.dtype,
) -> Tensor:
    """What `rotary_embedding` turned, up to the rounding of what came out; without a gradient.

    Args:
        x: q' or k'.
        cos, sin, heads_dim: as there; the result is not finite where they make of a pair of columns what does
            not tell it.
        strides: of the result.
        out_dtype: dtype of the result.
    """
    chosen = resolve("auto", x, cos, sin)
    back: Tensor = _rotary(x, cos, sin, heads_dim, "inverse", strides, out_dtype, chosen)
    return back
