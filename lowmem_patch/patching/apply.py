"""Carry out a plan on one model object, all or nothing, and undo it."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from lowmem_patch.errors import PatchError
from lowmem_patch.nn.activations import CodesActivation
from lowmem_patch.nn.adapters import release_adapter, use_adapter
from lowmem_patch.nn.copies import keep_matrix, keep_weight, release_input
from lowmem_patch.nn.dropout import PackedDropout
from lowmem_patch.nn.joint import follow_joint
from lowmem_patch.nn.norms import (
    MSLayerNorm,
    MSNorm,
    MSRMSNorm,
    StockMSLayerNorm,
    StockMSRMSNorm,
)
from lowmem_patch.nn.recompute import RecomputedActivation
from lowmem_patch.nn.rotary import release_rotary, use_rotary
from lowmem_patch.patching.fold import fold_step, unfold_step
from lowmem_patch.patching.plan import ActivationPatch, DropoutPatch, NormPatch, Patch, Plan
from lowmem_patch.patching.sites import FoldStep

__all__ = ["Applied", "apply_plan", "is_replacement", "undo"]


@dataclasses.dataclass
class Folded:
    """What is needed to unfold one norm: its affine, and which of its parameters trained."""

    step: FoldStep
    gamma: Tensor | None
    beta: Tensor | None
    trained: tuple[str, ...]
    trained_with: tuple[nn.Parameter, ...]  # weights of the Linears that trained then


@dataclasses.dataclass
class Applied:
    """Everything that was changed, so that it can be changed back."""

    folded: list[Folded] = dataclasses.field(default_factory=list)
    hooked: list[nn.Module] = dataclasses.field(default_factory=list)


_ORIGINAL = "_lowmem_patch_original"
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def _replacement(original: nn.Module, patch: Patch, lowers: bool) -> nn.Module:
    new: nn.Module
    if isinstance(patch, ActivationPatch):
        codes = patch.strategy == "codes"
        if codes:
            new = CodesActivation(patch.kind, patch.in_place)
        else:
            new = RecomputedActivation(patch.kind, lowers)
    elif isinstance(patch, DropoutPatch):
        new = PackedDropout(patch.p)
    else:
        new = _norm(original, patch, lowers)
    new.training = original.training
    for hooks in _HOOKS:  # a user's hooks stay attached
        setattr(new, hooks, getattr(original, hooks))
    return new


def _norm_class(original: nn.Module, kind: str) -> type[MSNorm]:
    if kind == "layer_norm":
        return StockMSLayerNorm if isinstance(original, nn.LayerNorm) else MSLayerNorm
    return StockMSRMSNorm if isinstance(original, nn.RMSNorm) else MSRMSNorm


def _norm(original: nn.Module, patch: NormPatch, lowers: bool) -> MSNorm:
    spec = patch.spec
    new = _norm_class(original, spec.kind)(
        getattr(original, "weight", None),
        getattr(original, "bias", None),
        spec.eps,
        weight_offset=spec.weight_offset,
        folded=patch.folded,
        feeds_autocast=patch.feeds_autocast,
        full_precision_autocast=spec.full_precision_autocast,
        output=spec.output,
        sunk=patch.sunk,
        one_copy=patch.one_copy,
        lowers=lowers,
        shares_copy=patch.shares_copy,
        output_saved=patch.output_saved,
    )
    # what other code may read off the original (variance_epsilon, normalized_shape) stays readable
    for name, value in vars(original).items():
        if (
            not name.startswith("_")
            and name not in vars(new)
            and isinstance(value, (int, float, tuple, str))
        ):
            setattr(new, name, value)
    return new


def apply_plan(model: nn.Module, plan: Plan, *, arithmetic: bool = True) -> Applied:
    """Swap modules and fold weights in place.

    Args:
        arithmetic: False swaps modules only, for a shadow without data.

    Raises:
        PatchError: something failed; the model is as it was.
    """
    applied = Applied()
    replacements: dict[int, nn.Module] = {}
    for name, patch in plan.patches.items():
        original = model.get_submodule(name)
        new = replacements[id(original)] = _replacement(original, patch, plan.lowers)
        # not registered: it is no submodule, but travels with every copy of its replacement
        new.__dict__[_ORIGINAL] = original
    try:
        for site in plan.sites:
            if site.fold is not None and site.strategy == "fold":
                _fold(model, site.fold, applied, arithmetic)
        for parent in list(model.modules()):
            for slot, child in list(parent._modules.items()):
                if child is not None and id(child) in replacements:
                    parent._modules[slot] = replacements[id(child)]
        for name in plan.adapters.layers:
            layer = model.get_submodule(name)
            use_adapter(layer, plan.lowers)
            applied.hooked.append(layer)
        for name in plan.frozen_linears:
            linear = model.get_submodule(name)
            linear.register_forward_pre_hook(keep_weight)
            applied.hooked.append(linear)
        for name in plan.softmaxes:
            softmax = model.get_submodule(name)
            softmax.register_forward_hook(keep_matrix)
            applied.hooked.append(softmax)
        for name, rotation in plan.rotations.items():
            attention = model.get_submodule(name)
            use_rotary(attention, rotation)
            applied.hooked.append(attention)
        for name in plan.joint:
            joint = model.get_submodule(name)
            joint.register_forward_hook(follow_joint)
            applied.hooked.append(joint)
    except Exception as error:  # whatever went wrong, the model must be put back first
        undo(model, applied, arithmetic=arithmetic)
        raise PatchError(
            f"the model was put back as it was, since patching failed: {error}"
        ) from error
    return applied


def _fold(model: nn.Module, step: FoldStep, applied: Applied, arithmetic: bool) -> None:
    names = [name for name in (step.weight, step.bias) if name is not None]
    trained = tuple(name for name in names if model.get_parameter(name).requires_grad)
    weights = (model.get_parameter(linear.weight) for linear in step.linears)
    trained_with = tuple(weight for weight in weights if weight.requires_grad)
    gamma, beta = fold_step(model, step) if arithmetic else (None, None)
    applied.folded.append(Folded(step, gamma, beta, trained, trained_with))
    for name in names:
        # an identity that nothing reads: DDP must not wait for its gradient, nor an optimizer move it by
        # one that is left over
        identity = model.get_parameter(name).requires_grad_(False)
        identity.grad = None


def undo(
    model: nn.Module, applied: Applied, *, arithmetic: bool = True, unfold: bool = True
) -> None:
    """Put the original modules back and unfold the weights (also after training).

    Replacements are looked for where they are now: an adapter may have wrapped or copied them.
    """
    for parent in list(model.modules()):
        for slot, current in list(parent._modules.items()):
            if current is not None and is_replacement(current):
                parent._modules[slot] = _original_of(current)
    for layer in applied.hooked:
        release_input(layer)
        release_adapter(layer)
        release_rotary(layer)
    for folded in reversed(applied.folded):
        if arithmetic and unfold:
            unfold_step(model, folded.step, folded.gamma, folded.beta)
        # who froze those Linears since then did not mean this norm to train
        if all(weight.requires_grad for weight in folded.trained_with):
            for name in folded.trained:
                model.get_parameter(name).requires_grad_(True)
    applied.folded.clear()
    applied.hooked.clear()


def is_replacement(module: nn.Module) -> bool:
    """Whether the module was put in place of another one."""
    return _ORIGINAL in module.__dict__


def _original_of(current: nn.Module) -> nn.Module:
    original: nn.Module = current.__dict__[_ORIGINAL]
    original.training = current.training
    # unlike the tables of hooks, no object that both hold
    original._is_full_backward_hook = current._is_full_backward_hook
    if isinstance(current, PackedDropout) and isinstance(original, nn.Dropout):
        original.p = current.p  # users set it on every dropout of a model
    if isinstance(current, MSNorm):  # parameters may have been replaced, by .to() for example
        for name in ("weight", "bias"):
            if name in original._parameters:
                original._parameters[name] = current._parameters[name]
    return original
