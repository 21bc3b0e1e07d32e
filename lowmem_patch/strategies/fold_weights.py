"""Folding: W' = W diag(gamma), b' = b + W beta, and an identity left behind in the norm.

Since W (gamma * z + beta) + b = (W diag(gamma)) z + (b + W beta), the function does not change.
Computed in float64 and rounded once to the dtype of the weights.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from lowmem_patch.constants import NormSettings
from lowmem_patch.errors import PatchError
from lowmem_patch.tracing.consumers import LinearRef

_PLAIN = NormSettings(0.0)

# a smaller gamma cannot be divided out again: unfolding leaves such columns folded
_SMALLEST_GAMMA = 1e-30


@dataclasses.dataclass(frozen=True)
class FoldStep:
    """One norm whose affine moves into Linears; names are state-dict keys of the model.

    The fields are those of a converted checkpoint's record.
    """

    norm: str
    weight: str | None
    bias: str | None
    weight_offset: float
    linears: tuple[LinearRef, ...]

    @property
    def settings(self) -> NormSettings:
        """The settings of the norm, as far as folding asks for them."""
        return NormSettings(0.0, self.weight_offset)


def fold_tensors(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    settings: NormSettings = _PLAIN,
    *,
    transposed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Fold a norm's affine into one Linear; new tensors, the arguments are not changed.

    Args:
        weight: ``[out, in]``, or ``[in, out]`` if ``transposed``.
        bias: ``[out]`` or None.
        gamma: the norm's weight as stored, ``[in]``; the factor is ``settings.gamma_of(gamma)``.
        beta: ``[in]`` or None.

    Raises:
        PatchError: beta is not 0 and there is no bias to take it.
    """
    matrix = weight.double().t() if transposed else weight.double()
    new_bias = bias
    if beta is not None:
        shift = matrix @ beta.double()
        if bias is not None:
            new_bias = (bias.double() + shift).to(bias.dtype)
        elif bool((beta != 0).any()):
            raise PatchError("beta is not 0 and the Linear has no bias to take it")
    if gamma is not None:
        matrix = matrix * settings.gamma_of(gamma.double())
    folded = matrix.t() if transposed else matrix
    return folded.to(weight.dtype).contiguous(), new_bias


def unfold_tensors(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    settings: NormSettings = _PLAIN,
    *,
    transposed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The inverse of :func:`fold_tensors`, up to one rounding; columns with gamma = 0 stay folded."""
    matrix = weight.double().t() if transposed else weight.double()
    if gamma is not None:
        matrix = matrix / _divisor(gamma, settings)
    new_bias = bias
    if beta is not None and bias is not None:
        new_bias = (bias.double() - matrix @ beta.double()).to(bias.dtype)
    unfolded = matrix.t() if transposed else matrix
    return unfolded.to(weight.dtype).contiguous(), new_bias


def _divisor(gamma: Tensor, settings: NormSettings) -> Tensor:
    factor = settings.gamma_of(gamma.double())
    return torch.where(factor.abs() < _SMALLEST_GAMMA, torch.ones_like(factor), factor)


def identity_affine(gamma: Tensor | None, beta: Tensor | None, settings: NormSettings) -> bool:
    """Whether the affine does nothing: gamma is 1 (0 for 1 + w norms) and beta is 0."""
    one = gamma is None or bool((gamma == settings.identity_weight).all())
    return one and (beta is None or bool((beta == 0).all()))


def _parameter(model: nn.Module, name: str | None) -> nn.Parameter | None:
    return None if name is None else model.get_parameter(name)


@torch.no_grad()
def fold_step(model: nn.Module, step: FoldStep) -> tuple[Tensor | None, Tensor | None]:
    """Fold one norm of the model in place; returns copies of its gamma and beta for :func:`unfold_step`.

    Raises:
        PatchError: a folded weight is not finite; nothing was changed.
    """
    gamma, beta = _parameter(model, step.weight), _parameter(model, step.bias)
    kept = tuple(None if t is None else t.detach().clone() for t in (gamma, beta))
    if gamma is not None and not gamma.is_meta and identity_affine(gamma, beta, step.settings):
        return kept[0], kept[1]
    folded = []
    for linear in step.linears:
        weight, bias = model.get_parameter(linear.weight), _parameter(model, linear.bias)
        new = fold_tensors(weight, bias, gamma, beta, step.settings, transposed=linear.transposed)
        if any(t is not None and not t.is_meta and not bool(torch.isfinite(t).all()) for t in new):
            raise PatchError(
                f"folding {step.norm} into {linear.module} gives weights that are not finite"
            )
        folded.append((weight, bias, new))
    for weight, bias, new in folded:
        _write(weight, bias, new)
    if gamma is not None:
        gamma.fill_(step.settings.identity_weight)
    if beta is not None:
        beta.zero_()
    return kept[0], kept[1]


def _write(weight: Tensor, bias: Tensor | None, new: tuple[Tensor, Tensor | None]) -> None:
    weight.copy_(new[0])
    if bias is not None and new[1] is not None:
        bias.copy_(new[1])


@torch.no_grad()
def unfold_step(
    model: nn.Module, step: FoldStep, gamma: Tensor | None, beta: Tensor | None
) -> None:
    """Undo :func:`fold_step` in place, with what it returned; also after the weights were trained."""
    weights = [
        (model.get_parameter(ref.weight), _parameter(model, ref.bias), ref) for ref in step.linears
    ]
    own_gamma, own_beta = _parameter(model, step.weight), _parameter(model, step.bias)
    gamma = None if gamma is None or own_gamma is None else gamma.to(own_gamma)
    beta = None if beta is None or own_beta is None else beta.to(own_beta)
    if identity_affine(gamma, beta, step.settings):
        return
    for weight, bias, ref in weights:
        new = unfold_tensors(weight, bias, gamma, beta, step.settings, transposed=ref.transposed)
        _write(weight, bias, new)
    if own_gamma is not None and gamma is not None:
        own_gamma.copy_(step.settings.weight_of(_divisor(gamma, step.settings)))
    if own_beta is not None and beta is not None:
        own_beta.copy_(beta)
