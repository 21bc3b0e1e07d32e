"""BatchNorm and GroupNorm with an activation behind them; see `lowmem_patch.functional.channel_norms`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowmem_patch import formulas
from lowmem_patch.constants import ChannelNormInput, wide


def channel_statistics(
    x: Tensor,
    groups: int,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """mean and rstd, as of `ChannelNormInput`.

    Args:
        x, groups: as there.
        running_mean, running_var: ``[C]``, moved in place towards the mean and the unbiased variance, by the
            share ``momentum``; without groups.
    """
    values = x.to(wide(x.dtype))
    if groups:
        values, dims = values.reshape(x.shape[0] * groups, -1), [1]
    else:
        dims = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(values, dims, correction=0)
    if running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt_()


def _per_channel(vector: Tensor, x: Tensor, groups: int = 0) -> Tensor:
    """A number for each channel, or for each group of each sample, in the dimensions of ``x``."""
    if groups:
        vector = vector.view(-1, groups).repeat_interleave(x.shape[1] // groups, 1)
    return vector.view(-1, x.shape[1], *(1,) * (x.dim() - 2))


def _normalized(given: ChannelNormInput) -> tuple[Tensor, Tensor]:
    """z and z weight + bias + residual, unrounded."""
    x, mean, rstd, weight, bias, groups, _, residual = given
    z = (x - _per_channel(mean, x, groups)) * _per_channel(rstd, x, groups)
    y = z if weight is None else z * _per_channel(weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    return z, y if residual is None else y + residual


def channel_norm_forward(given: ChannelNormInput, out_dtype: torch.dtype) -> Tensor:
    """h((x - mean) rstd weight + bias + residual) in ``out_dtype``, in the strides of x."""
    y = _normalized(given)[1]
    return (y if given.kind is None else formulas.FORWARD[given.kind](y)).to(out_dtype)


def channel_sum_gradient(dy: Tensor, given: ChannelNormInput) -> Tensor:
    """The gradient of what h is of, in the dtype and strides of x.

    Args:
        dy: shape of x; the gradient of what `channel_norm_forward` gives.
    """
    assert given.kind is not None
    y = _normalized(given)[1]
    return torch.empty_like(given.x).copy_(formulas.BACKWARD[given.kind](dy.to(y.dtype), y))


def channel_norm_backward(dy: Tensor, given: ChannelNormInput) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, in its dtype and strides, and of weight and bias, in weight's dtype, or mean's.

    Args:
        dy: shape of x; the gradient of what `channel_norm_forward` gives without a residual.
    """
    x, mean, rstd, weight, _, groups, kind, _ = given
    z, y = _normalized(given)
    d_y = dy.to(mean.dtype)
    if kind is not None:
        d_y = formulas.BACKWARD[kind](d_y, y)
    dims = [0, *range(2, x.dim())]
    d_weight, d_bias = (d_y * z).sum(dims), d_y.sum(dims)
    g = d_y if weight is None else d_y * _per_channel(weight, x)

    def mean_of(one: Tensor) -> Tensor:
        if groups:
            return _per_channel(one.reshape(x.shape[0] * groups, -1).mean(1), x, groups)
        return one.mean(dims, keepdim=True)

    dx = _per_channel(rstd, x, groups) * (g - mean_of(g) - z * mean_of(g * z))
    dtype = mean.dtype if weight is None else weight.dtype
    return torch.empty_like(x).copy_(dx), d_weight.to(dtype), d_bias.to(dtype)
