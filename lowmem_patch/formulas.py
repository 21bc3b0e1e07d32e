"""The activations and their derivatives, as torch itself computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import QUICK_GELU_SCALE, SELU_ALPHA, SELU_SCALE, ActivationKind, wide

_aten = torch.ops.aten
FORWARD: Final[dict[ActivationKind, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK_GELU_SCALE * x),
    "relu_squared": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "selu": F.selu,
    "softplus": F.softplus,
    "mish": F.mish,
}

# torch's own formulas, of dy and x
BACKWARD: Final[dict[ActivationKind, Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": _aten.gelu_backward,
    "gelu_tanh": partial(_aten.gelu_backward, approximate="tanh"),
    "silu": _aten.silu_backward,
    "quick_gelu": lambda dy, x: _quick_gelu_backward(dy, x),
    "relu_squared": lambda dy, x: _aten.threshold_backward(dy * (2 * F.relu(x)), x, 0),
    "relu": lambda dy, x: _aten.threshold_backward(dy, x, 0),
    "leaky_relu": lambda dy, x: _aten.leaky_relu_backward(dy, x, 0.01, False),
    "relu6": lambda dy, x: _aten.hardtanh_backward(dy, x, 0, 6),
    "hardsigmoid": _aten.hardsigmoid_backward,
    "hardswish": _aten.hardswish_backward,
    "sigmoid": lambda dy, x: _aten.sigmoid_backward(dy, torch.sigmoid(x)),
    "tanh": lambda dy, x: _aten.tanh_backward(dy, torch.tanh(x)),
    "elu": lambda dy, x: _aten.elu_backward(dy, 1, 1, 1, False, x),
    "selu": lambda dy, x: _aten.elu_backward(dy, SELU_ALPHA, SELU_SCALE, 1, False, x),
    "softplus": lambda dy, x: _aten.softplus_backward(dy, x, 1, 20),
    "mish": _aten.mish_backward,
}


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    # h(x) = silu(s x) / s, so h'(x) = silu'(s x)
    dtype = wide(x.dtype)
    dx: Tensor = _aten.silu_backward(dy.to(dtype), QUICK_GELU_SCALE * x.to(dtype))
    return dx.to(x.dtype)
