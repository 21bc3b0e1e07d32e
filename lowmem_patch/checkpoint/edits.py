"""The change of each stored tensor when norms are folded; computed in float64, to be rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lowmem_patch.constants import NormSettings
from lowmem_patch.errors import CheckpointError
from lowmem_patch.strategies.fold_weights import FoldStep, fold_tensors, identity_affine

# Takes the tensor as stored; returns one of the same shape, which the caller casts.
Edit = Callable[[Tensor], Tensor]


def fold_refusal(step: FoldStep, stored: Mapping[str, Tensor]) -> str | None:
    """Why the stored values cannot be folded, or None; ``stored`` as in :func:`fold_edits`."""
    gamma, beta = _affine(step, stored)
    if identity_affine(gamma, beta, step.settings):
        return "already an identity"
    if beta is None or not bool((beta != 0).any()):
        return None
    without_bias = next((linear.module for linear in step.linears if linear.bias is None), None)
    if without_bias is None:
        return None
    return f"beta is not 0 and {without_bias} has no bias to take it"


def _affine(step: FoldStep, stored: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """gamma and beta, each None where the norm has none."""
    return stored.get(step.weight or ""), stored.get(step.bias or "")


def fold_edits(
    steps: Sequence[FoldStep], names: Mapping[str, str], stored: Mapping[str, Tensor]
) -> dict[str, Edit]:
    """Edits by the names of the stored tensors; other tensors are copied.

    Args:
        names: state-dict entry to the stored tensor's name, for every parameter of ``steps``.
        stored: state-dict entry to the stored tensor.

    Raises:
        CheckpointError: two folds change one tensor.
    """
    edits: dict[str, Edit] = {}

    def add(key: str, edit: Edit) -> None:
        if names[key] in edits:
            raise CheckpointError(f"{names[key]} would be folded twice: please report this model")
        edits[names[key]] = edit

    for step in steps:
        gamma, beta = _affine(step, stored)
        if step.weight is not None:
            add(step.weight, partial(torch.full_like, fill_value=step.settings.identity_weight))
        if step.bias is not None:
            add(step.bias, torch.zeros_like)
        for linear in step.linears:
            add(linear.weight, partial(_fold_weight, gamma, step.settings, linear.transposed))
            if linear.bias is not None and beta is not None:
                weight = stored[linear.weight]
                add(linear.bias, partial(_fold_bias, beta, weight, linear.transposed))
    return edits


def _fold_weight(
    gamma: Tensor | None, settings: NormSettings, transposed: bool, weight: Tensor
) -> Tensor:
    return fold_tensors(weight.double(), None, gamma, None, settings, transposed=transposed)[0]


def _fold_bias(beta: Tensor, weight: Tensor, transposed: bool, bias: Tensor) -> Tensor:
    """Adds W beta to the bias, with W as stored (not folded)."""
    folded = fold_tensors(weight.double(), bias.double(), None, beta, transposed=transposed)[1]
    assert folded is not None
    return folded
