"""What a saved tensor is saved for, by the torch function and the module that saved it.

Labels for people: nothing is planned from them. A norm and an activation are told by what they run
(`layer_norm`, `gelu`) or else by their class names.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import nn

from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.op_roles import MATMULS, WEIGHT_MATMULS, Role, role_of

CATEGORIES = (
    "linear inputs",  # of matmuls whose weight trains
    "attention",
    "norms",
    "activations",  # their inputs, and the factors of gated products
    "codes and statistics",
    "head and loss",
    "rest",
)
# a frozen weight saves no input: what its matmul saved was deferred
_BY_ROLE = (
    (MATMULS | Role.SOFTMAX | Role.FUSED_ATTENTION | Role.FLEX_ATTENTION, "attention"),
    (Role.ROW_NORM | Role.CHANNEL_NORM, "norms"),
    (Role.CROSS_ENTROPY | Role.LOG_SOFTMAX | Role.LOG_SUM_EXP | Role.GATHER, "head and loss"),
    (WEIGHT_MATMULS | Role.ACTIVATION, "activations"),
)
# in a block there are no logits: attention normalises its scores so, and a router gathers
_IN_BLOCKS = ((Role.LOG_SOFTMAX | Role.LOG_SUM_EXP, "attention"), (Role.GATHER, "rest"), *_BY_ROLE)
# a norm may run right before its Linear, in there
_FIRST_FOUND = ("attention", "linear inputs", "norms", "head and loss", "activations")
# a statistic holds one number a row; no norm is narrower than this
_NARROWEST_ROW = 8


class Saver(NamedTuple):
    """Who saved a tensor: the innermost module, the torch function that ran, and whether that is a
    matmul of a weight that trains."""

    module: str
    function: str
    weighted: bool = False


def module_categories(model: nn.Module) -> dict[str, str]:
    """The category of what a module itself saves, by its path: of norms, of activations and the modules
    around them, and of adapter layers, which may run as one op that no torch function announces."""
    categories: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            categories[name] = "linear inputs"
        if not is_leaf(module):
            continue
        label = type(module).__name__.lower()
        if "norm" in label:
            categories[name] = "norms"
        elif any(word in label for word in ("activation", "gelu", "silu", "relu", "swish", "mish")):
            categories[name] = "activations"
            # the product of a gated MLP is written in the module around its activation
            categories.setdefault(name.rpartition(".")[0], "activations")
    return categories


def category_of(
    dtype: torch.dtype,
    elements: int,
    savers: Sequence[Saver],
    categories: dict[str, str],
    largest: int,
    scores: Set[tuple[str, int]],
) -> str:
    """The category of a saved tensor.

    Args:
        elements: how many the tensor has.
        categories: of modules, from :func:`module_categories`.
        largest: elements of the largest tensor that the first saver's module saved.
        scores: modules with the elements of what a softmax saved there.
    """
    found = {_saver_category(saver, categories) for saver in savers}
    if found == {"rest"} and dtype.is_floating_point:
        # what is done with scores before their softmax is attention's
        found = {"attention" if (s.module, elements) in scores else "rest" for s in savers}
    adapted = any(categories.get(saver.module) == "linear inputs" for saver in savers)
    packed = not dtype.is_floating_point and dtype != torch.int8  # values in 8 bits
    # one number a row; x A^T of an adapter has few numbers a row, too
    statistic = elements * _NARROWEST_ROW <= largest and not adapted
    category = next((one for one in _FIRST_FOUND if one in found), "rest")
    coded = {
        "linear inputs": packed or statistic,
        "norms": packed or statistic,
        "activations": packed,
        "rest": dtype == torch.uint8,  # a packed mask
    }
    return "codes and statistics" if coded.get(category, False) else category


def _saver_category(saver: Saver, categories: dict[str, str]) -> str:
    if saver.weighted:
        return "linear inputs"
    role = role_of(saver.function)
    in_block = any(part.isdigit() for part in saver.module.split("."))
    table = _IN_BLOCKS if in_block else _BY_ROLE
    by_role = (category for roles, category in table if role.has(roles))
    return next(by_role, categories.get(saver.module, "rest"))
