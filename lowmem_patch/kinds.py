"""What a saved tensor is kept for, by the torch function and the module that saved it.

Labels for people: nothing is planned from them. A norm and an activation are told by what they run
(`layer_norm`, `gelu`) or else by their class names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "ATTENTION",
    "ELEMENTWISE",
    "KINDS",
    "MATMULS",
    "WEIGHTED",
    "Saver",
    "kind_of",
    "module_kinds",
    "reads_weight",
]

KINDS = (
    "linear inputs",  # of matmuls whose weight trains
    "attention",
    "norms",
    "activations",  # their inputs, and the factors of gated products
    "codes and statistics",
    "rest",
)
# matmuls of a weight, always; the others are so when one operand is a parameter
WEIGHTED = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d", "grouped_mm", "_grouped_mm"))
MATMULS = frozenset(("matmul", "__matmul__", "mm", "bmm", "baddbmm", "einsum"))
ATTENTION = frozenset(
    ("scaled_dot_product_attention", "softmax", "multi_head_attention_forward", *MATMULS)
)
ELEMENTWISE = frozenset(
    ("gelu", "silu", "relu", "sigmoid", "tanh", "relu_", "silu_", "softplus", "mish", "elu",
     "leaky_relu", "hardswish", "hardtanh", "hardsigmoid", "logsigmoid", "relu6", "celu", "selu")
)  # fmt: skip
_NORMS = frozenset(("layer_norm", "rms_norm", "group_norm", "batch_norm", "native_layer_norm"))
# a statistic holds one number a row; no norm is narrower than this
_NARROWEST_ROW = 8


class Saver(NamedTuple):
    """Who saved a tensor: the innermost module, the torch function that ran, and whether that is a
    matmul of a weight that trains."""

    module: str
    function: str
    weighted: bool = False


def reads_weight(
    function: str, arguments: Iterable[object], is_weight: Callable[[Tensor], bool]
) -> bool:
    """Whether a function is a matmul of a parameter that trains."""
    if function not in WEIGHTED and function not in MATMULS:
        return False
    return any(
        isinstance(item, Tensor) and item.requires_grad and item.dim() > 1 and is_weight(item)
        for item in arguments
    )


def module_kinds(model: nn.Module) -> dict[str, str]:
    """The kind of what a module itself saves, by its path: of norms, of activations and the modules around
    them, and of adapter layers, which may run as one op that no torch function announces."""
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            kinds[name] = "linear inputs"
        if next(module.children(), None) is not None:
            continue
        label = type(module).__name__.lower()
        if "norm" in label:
            kinds[name] = "norms"
        elif any(word in label for word in ("activation", "gelu", "silu", "relu", "swish", "mish")):
            kinds[name] = "activations"
            # the product of a gated MLP is written in the module around its activation
            kinds.setdefault(name.rpartition(".")[0], "activations")
    return kinds


def kind_of(tensor: Tensor, savers: Iterable[Saver], kinds: dict[str, str], largest: int) -> str:
    """The kind of a saved tensor.

    Args:
        kinds: of modules, from :func:`module_kinds`.
        largest: elements of the largest tensor that the first saver's module saved.
    """
    savers = tuple(savers)
    found = {_kind(saver, kinds) for saver in savers}
    adapted = any(kinds.get(saver.module) == "linear inputs" for saver in savers)  # x A^T is narrow
    if "attention" in found:
        return "attention"
    for kind in ("linear inputs", "norms"):  # a norm may run right before its Linear, in there
        if kind in found:
            packed = not tensor.is_floating_point()
            small = packed or (tensor.numel() * _NARROWEST_ROW <= largest and not adapted)
            return "codes and statistics" if small else kind
    if "activations" in found:
        packed = not tensor.is_floating_point()
        return "codes and statistics" if packed else "activations"
    return "codes and statistics" if tensor.dtype == torch.uint8 else "rest"  # a packed mask


def _kind(saver: Saver, kinds: dict[str, str]) -> str:
    if saver.weighted:
        return "linear inputs"
    if saver.function in ATTENTION:
        return "attention"
    if saver.function in WEIGHTED:  # a frozen weight keeps no input: what it saw was deferred
        return "activations"
    if saver.function in _NORMS:
        return "norms"
    if saver.function in ELEMENTWISE:
        return "activations"
    return kinds.get(saver.module, "rest")
