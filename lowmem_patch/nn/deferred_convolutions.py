"""Convolutions that train and read a deferred tensor without storage.

They save what torch's own would save, the deferred tensor, and read its values in forward and in backward.
Torch would ask the tensor's class for each of its operators on the way, which takes the host longer than the
convolution itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.functional import (
    direct_call,
    first_order,
    in_compiler,
    is_transformed,
    without_autocast,
    without_torch_function,
)
from lowmem_patch.nn.context import autocast_dtype, is_foreign, product_dtype, to_save
from lowmem_patch.nn.deferred import Unstored
from lowmem_patch.reference import cast

_convolution: Any = torch.ops.aten.convolution.default
_convolution_backward: Any = torch.ops.aten.convolution_backward.default


class _Call(NamedTuple):
    """How torch.conv1d, conv2d or conv3d is called; a setting is a number, or one for each dimension."""

    input: Unstored
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    @property
    def settings(self) -> tuple[Any, ...]:
        """What the operators of all numbers of dimensions are given."""
        each = (self.stride, self.padding, self.dilation)
        stride, padding, dilation = ((one,) if isinstance(one, int) else one for one in each)
        # not transposed, so that there is no padding of the output
        return stride, padding, dilation, False, (0,), self.groups

    def is_known(self, dimensions: int, dtype: torch.dtype) -> bool:
        """Whether this is one that trains, of a batch, and with settings in Python's numbers."""
        x, weight, bias = self.input, self.weight, self.bias
        if not _is_read_in(dtype, weight) or not (bias is None or _is_read_in(dtype, bias)):
            return False
        settings = (self.stride, self.padding, self.dilation)
        in_numbers = all(isinstance(one, (int, tuple, list)) for one in settings)
        trains = x.requires_grad and weight.requires_grad
        return trains and in_numbers and x.dim() == weight.dim() == dimensions


def _is_read_in(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether torch reads a weight or bias in a dtype: it refuses another one, which autocast alone casts."""
    if is_foreign(tensor):
        return False
    own = tensor.dtype
    cast_to = autocast_dtype(tensor.device.type, own) if tensor.is_floating_point() else None
    return own == dtype or cast_to == dtype


class _Convolution(torch.autograd.Function):
    """x, weight, bias -> y. Saved: x, and the weight as it is given, which is cast again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Unstored,
        weight: Tensor,
        bias: Tensor | None,
        settings: Any,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.bias = settings, None if bias is None else bias.dtype
        value = x.read_for("convolution")
        with without_autocast(weight.device.type):
            given = (None if one is None else cast(one, dtype) for one in (value, weight, bias))
            y: Tensor = _convolution(*given, *settings)
        x.op.was_read(x)
        return y

    @staticmethod
    @first_order("convolution")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors  # who wrote into one gets torch's own error
        needs = ctx.needs_input_grad[:3]
        with without_torch_function(), without_autocast(weight.device.type):
            # who packs what is saved may give an ordinary tensor back
            value = x.read() if isinstance(x, Unstored) else x
            sizes = None if ctx.bias is None else [len(weight)]
            given = (dy, cast(value, dy.dtype), cast(weight, dy.dtype), sizes)
            dx, d_weight, d_bias = _convolution_backward(*given, *ctx.settings, needs)
            if isinstance(x, Unstored):
                x.op.was_read(x)
            dx = None if dx is None else cast(dx, value.dtype)
        d_weight = None if d_weight is None else cast(d_weight, weight.dtype)
        return dx, d_weight, None if d_bias is None else cast(d_bias, ctx.bias), None, None


_NAMES = frozenset(_Call._fields)
_call = direct_call(_Convolution)


def read_convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` as one op; NotImplemented where torch's own serves, or says what is wrong."""
    x = args[0]
    if not isinstance(x, Unstored) or in_compiler() or not torch.is_grad_enabled():
        return NotImplemented
    if len(args) > len(_Call._fields) or not kwargs.keys() <= _NAMES or x.is_changed():
        return NotImplemented
    call = _Call(*args, **kwargs)
    dtype = product_dtype(x.dtype, call.weight)
    dimensions = 2 + int(func.__name__[len("conv")])  # of a batch, for conv2d
    if dtype is None or not call.is_known(dimensions, dtype) or is_transformed():
        return NotImplemented
    return _call(x, to_save(call.weight, dtype), call.bias, call.settings, dtype)
