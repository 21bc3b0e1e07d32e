"""A norm over channels and the activation behind it, which save the norm's input and nothing else.

    z = (x - mean) rstd,    y = z w[c] + b[c],    a = h(y)    or, of a residual block,    a = h(y + r)

mean and rstd are of one channel in the whole batch (BatchNorm), or of a group of channels of one sample
(GroupNorm); w and b are of a channel c. With means over the same elements,

    d_y = d_a h'(y),    g = d_y w,    d_x = rstd (g - mean(g) - z mean(g z)),
    d_w = sum d_y z,    d_b = sum d_y,    d_r = d_y = d_a h'(y + r)

Torch saves x for the norm, y for h, and a for the convolution behind it. Once mean and rstd are known, y and
a are elementwise in x: they are computed again, and a is made of x by one kernel. (In-Place Activated
BatchNorm, arXiv 1712.02616, saves a and inverts h, which must be monotonic for that.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.constants import ActivationKind, ChannelNormInput, wide
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import dispatched, module, resolve


class ChannelNorm(NamedTuple):
    """What is computed of an ``x [B, C, ...]``.

    Attributes:
        groups: of channels, of each sample; 0: BatchNorm.
        has_weight, has_bias: whether there are w and b, ``[C]``.
        residual: whether there is r, in the shape and strides of x.
        kind: of h; None for y, or y + r, itself.
        out_dtype: of the value.
    """

    groups: int
    has_weight: bool
    has_bias: bool
    residual: bool
    kind: ActivationKind | None
    out_dtype: torch.dtype

    def _given(self, sources: tuple[Tensor, ...]) -> ChannelNormInput:
        x, mean, rstd, *rest = sources
        given = iter(rest)
        has = (self.has_weight, self.has_bias, self.residual)
        weight, bias, residual = (next(given) if one else None for one in has)
        return ChannelNormInput(x, mean, rstd, weight, bias, self.groups, self.kind, residual)

    def value(self, *sources: Tensor) -> Tensor:
        """y, y + r or a, in the strides of x; no gradient.

        Args:
            sources: x, contiguous, or with its channels last in a BatchNorm; mean and rstd, from
                `channel_statistics`; w, b and r, those that there are.
        """
        given = self._given(sources)
        made: Tensor = _forward(*given, self.out_dtype, resolve("auto", given.x))
        return made

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        """Of the same tensors, None for mean and rstd."""
        given, kind = self._given(sources), self.kind
        summed: tuple[Tensor, ...] = ()
        if self.residual:
            if kind is not None:
                dy = _sum_gradient(dy, *given, resolve("auto", given.x))
            kind, summed = None, (dy,)
        dx, *vectors = _backward(dy, *given[:6], kind, resolve("auto", given.x))
        pairs = zip((given.weight, given.bias), vectors, strict=True)
        return dx, None, None, *(d.to(v.dtype) for v, d in pairs if v is not None), *summed


def channel_statistics(
    x: Tensor,
    groups: int,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """mean and rstd, ``[C]`` or ``[B groups]``, float32 (float64 for such an x); no gradient.

    Args:
        x: ``[B, C, ...]``, as of `ChannelNorm.value`.
        groups: of channels; 0: BatchNorm.
        running_mean, running_var: ``[C]``, of BatchNorm: written in place, as torch does.
    """
    # as torch, whose write does not count: evaluations before have saved these
    running = (None if one is None else one.data for one in (running_mean, running_var))
    found: tuple[Tensor, Tensor] = _statistics(
        x.detach(), groups, eps, *running, momentum, resolve("auto", x)
    )
    return found


def _statistics_fake(x: Tensor, groups: int, *_: Any) -> tuple[Tensor, Tensor]:
    length = x.shape[0] * groups if groups else x.shape[1]
    return x.new_empty(length, dtype=wide(x.dtype)), x.new_empty(length, dtype=wide(x.dtype))


def _backward_fake(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = mean.dtype if weight is None else weight.dtype
    vectors = (mean.new_empty(x.shape[1], dtype=dtype) for _ in range(2))
    return torch.empty_like(x), next(vectors), next(vectors)


_statistics = _library.Operator(
    "channel_statistics(Tensor x, int groups, float eps, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum, str implementation) -> (Tensor, Tensor)",
    dispatched("channel_statistics"),
    _statistics_fake,
)
_NORM = "Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, int groups, str? kind"
_forward = _library.Operator(
    f"channel_norm_forward({_NORM}, Tensor? residual, ScalarType out_dtype, str implementation) -> Tensor",
    lambda *a: module(a[-1]).channel_norm_forward(ChannelNormInput(*a[:8]), a[8]),
    lambda x, *rest: torch.empty_like(x, dtype=rest[7]),
)
_sum_gradient = _library.Operator(
    f"channel_sum_gradient(Tensor dy, {_NORM}, Tensor? residual, str implementation) -> Tensor",
    lambda dy, *a: module(a[-1]).channel_sum_gradient(dy, ChannelNormInput(*a[:8])),
    lambda dy, x, *rest: torch.empty_like(x),
)
_backward = _library.Operator(
    f"channel_norm_backward(Tensor dy, {_NORM}, str implementation) -> (Tensor, Tensor, Tensor)",
    lambda dy, *a: module(a[-1]).channel_norm_backward(dy, ChannelNormInput(*a[:7])),
    _backward_fake,
)
