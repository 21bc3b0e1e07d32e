"""What may not happen to a norm whose gamma and beta were folded into the next Linears."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from lowmem_patch.errors import PatchError, UnfoldedWeightsError
from lowmem_patch.functional import in_compiler, is_transformed
from lowmem_patch.nn.context import is_fsdp_unit
from lowmem_patch.nn.gamma_checks import GammaCheck
from lowmem_patch.nn.gammas import can_be_checked, is_capturing

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm


def refuse_changes(norm: MSNorm) -> None:
    """Raise where somebody changed a folded norm, or warn where a hook sees one.

    Raises:
        PatchError: gamma or beta was pruned, parametrized, written, or set to train.
    """
    replica = getattr(norm, "_is_replica", False)  # of nn.DataParallel, which has no parameters
    if norm._parameters.keys() != {"weight", "bias"} and not replica:
        raise PatchError(
            "the weight of a norm was pruned or parametrized after its affine had been folded into the "
            "next Linears, which would have no effect: call unpatch_model before, and patch_model again"
        )
    _refuse_writes(norm)
    hooks = (*norm._forward_hooks.values(), *norm._forward_pre_hooks.values())
    seen = any(not getattr(hook, "only_looks", False) for hook in hooks)
    if seen and not in_compiler() and not is_fsdp_unit(norm):
        warnings.warn(
            "a forward hook sees the output of a norm without gamma and beta, which were folded into the "
            "next Linears: call patch_model again, which leaves this norm unfolded",
            stacklevel=2,
        )
    if not torch.is_grad_enabled():
        return
    for parameter in (norm.weight, norm.bias):
        if parameter is not None and parameter.requires_grad:
            raise PatchError(
                "a norm whose affine was folded into the next Linears was set to train "
                "(requires_grad), which would have no effect: call patch_model again, after the "
                "last change of what trains and after get_peft_model"
            )


def _refuse_writes(norm: MSNorm) -> None:
    """Raise where somebody wrote into a folded gamma or beta, or set another, which nobody would read."""
    weight, bias, checks = norm.weight, norm.bias, norm.gamma_checks
    if in_compiler() or is_transformed() or not can_be_checked(weight, bias):
        return
    if checks.last is not None and checks.last.was_of(weight, bias):
        return
    if any(is_capturing(v.device) for v in (weight, bias) if v is not None):
        return
    for vector, identity in ((weight, norm.settings.identity_weight), (bias, 0.0)):
        if vector is not None and bool((vector.detach() != identity).any()):
            raise PatchError(
                "gamma or beta of a norm was written after both had been folded into the next Linears, "
                "which would have no effect: call unpatch_model before, and patch_model again"
            )
    checks.last = GammaCheck(weight, bias)


def refuse_unfolded(norm: MSNorm, state_dict: dict[str, Any], prefix: str) -> None:
    """Raise when the weights to be loaded are not those of a folded model.

    Raises:
        UnfoldedWeightsError: gamma is not 1 (0 for 1 + w norms) or beta is not 0.
    """
    for name, identity in (("weight", norm.settings.identity_weight), ("bias", 0.0)):
        value = state_dict.get(prefix + name)
        if value is not None and bool((value != identity).any()):
            raise UnfoldedWeightsError(
                f"{prefix}{name} is not {identity:g} everywhere, but this norm's affine was folded "
                "into the next Linears: load into an unpatched model (unpatch_model) and patch "
                "again, or load weights that `lowmem-patch convert` folded"
            )
