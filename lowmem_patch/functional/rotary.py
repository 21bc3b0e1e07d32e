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
from lowmem_patch.functional._implementation import (
    Implementation,
    check_floating,
    dispatched,
    resolve,
)


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


def turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int = 1,
    out_dtype: torch.dtype | None = None,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """Queries or keys turned by the angles of their positions; saves ``cos`` and ``sin`` alone.

    x' = x cos + rotate_half(x) sin on the first R columns, the others as they are, with
    rotate_half((x1, x2)) = (-x2, x1). Products are float32 inside (float64 for float64), whatever
    autocast says, and rounded once. It can be differentiated any number of times, by x.

    Args:
        x: ``[B, H, S, D]`` or, with ``heads_dim`` 2, ``[B, S, H, D]``, in any strides.
        cos, sin: ``[B or 1, S, R]``, R even and at most D, in any strides, without a gradient; their dtype
            may differ from that of ``x``, and their halves from each other.
        heads_dim: 1 or 2.
        out_dtype: dtype of the result, by default that of ``x``; float64 for this alone.
        implementation: see `resolve`.

    Returns:
        x' in the strides of ``torch.empty_like(x)``, as is the gradient; contiguous where columns would not
        lie side by side, which fused attention refuses.

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
    """What `turned` turned, up to the rounding of what came out; without a gradient.

    Args:
        x: what that gave.
        cos, sin, heads_dim: as there; the result is not finite where they make of a pair of columns what does
            not tell it.
        strides: of the result.
        out_dtype: dtype of the result.
    """
    chosen = resolve("auto", x, cos, sin)
    back: Tensor = _rotary(x, cos, sin, heads_dim, "inverse", strides, out_dtype, chosen)
    return back
