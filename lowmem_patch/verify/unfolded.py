"""Gradients of a model whose norms were folded, as gradients of the model before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lowmem_patch.strategies.fold_weights import FoldStep, fold_tensors


def map_gradients(
    gradients: Mapping[str, Tensor], original: Mapping[str, Tensor], steps: Iterable[FoldStep]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Gradients of a folded model as gradients of the unfolded one, in float64.

    W' = W diag(g) and b' = b + W beta are differentiated by W, g and beta.

    Args:
        gradients: of the folded model's parameters.
        original: parameters of the unfolded model.
        steps: the folds.

    Returns:
        The mapped gradients, and the names of parameters for which the folded model's frozen
        parameters leave them unknown.
    """
    mapped = dict(gradients)
    unknown: list[str] = []
    for step in steps:
        for name, gradient in _unfolded_gradients(gradients, original, step).items():
            if gradient is None:
                mapped.pop(name, None)
                unknown.append(name)
            else:
                mapped[name] = gradient
    return mapped, tuple(unknown)


def _unfolded_gradients(
    gradients: Mapping[str, Tensor], original: Mapping[str, Tensor], step: FoldStep
) -> dict[str, Tensor | None]:
    """Gradients of the parameters that one step changed, in float64; None where unknown.

    A Linear's weight without a gradient of its own is left out.
    """
    affine = {name: _leaf(original[name]) for name in (step.weight, step.bias) if name is not None}
    gamma, beta = affine.get(step.weight or ""), affine.get(step.bias or "")
    shifts = beta is not None and bool((beta != 0).any())
    found: dict[str, Tensor | None] = {}
    of_affine: dict[str, list[Tensor | None]] = {name: [] for name in affine}
    for linear in step.linears:
        given = gradients.get(linear.weight), gradients.get(linear.bias or "")
        weight = _leaf(original[linear.weight])
        bias = weight.new_zeros(weight.shape[int(linear.transposed)])
        transposed, settings = linear.transposed, step.settings
        with torch.enable_grad():
            new = fold_tensors(weight, bias, gamma, beta, settings, transposed=transposed)
        of_weight, *rest = _gradients_behind(new, given, (weight, *affine.values()))
        if given[0] is not None:
            found[linear.weight] = None if shifts and given[1] is None else of_weight
        for parts, part in zip(of_affine.values(), rest, strict=True):
            parts.append(part)
    for name, parts in of_affine.items():
        found[name] = _sum_if_known(parts, torch.zeros_like(affine[name]))
    return found


def _sum_if_known(parts: Sequence[Tensor | None], start: Tensor) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return sum(known, start) if len(known) == len(parts) else None


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def _gradients_behind(
    outputs: Sequence[Tensor | None], given: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of ``inputs`` from those that are known of what was made from them."""
    pairs = [
        (output, gradient.double())
        for output, gradient in zip(outputs, given, strict=True)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if not pairs:
        return [None] * len(inputs)
    made, known = zip(*pairs, strict=True)
    return torch.autograd.grad(made, inputs, known, allow_unused=True)
