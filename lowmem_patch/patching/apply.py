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
from lowmem_patch.patching.guard import guard_weights, release_weights
from lowmem_patch.patching.plan import ActivationPatch, DropoutPatch, NormPatch, Patch, Plan
from lowmem_patch.patching.sites import ORIGINAL, FoldStep, LinearRef

__all__ = ["Applied", "Folded", "apply_plan", "folded_now", "is_replacement", "undo"]


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


_SITE = "_lowmem_patch_site"  # the name that the replaced module had
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
        new.__dict__[ORIGINAL] = original
        new.__dict__[_SITE] = name
    try:
        for parent in list(model.modules()):
            for slot, child in list(parent._modules.items()):
                if child is not None and id(child) in replacements:
                    parent._modules[slot] = replacements[id(child)]
        for site in plan.sites:
            if site.fold is not None and site.strategy == "fold":
                _fold(model, site.fold, applied, arithmetic)
        guard_weights(model, [folded.step for folded in applied.folded])
        for name in plan.adapters.layers:
            use_adapter(model.get_submodule(name), plan.lowers)
        for name in plan.frozen_linears:
            model.get_submodule(name).register_forward_pre_hook(keep_weight)
        for name in plan.softmaxes:
            model.get_submodule(name).register_forward_hook(keep_matrix)
        for name, rotation in plan.rotations.items():
            use_rotary(model.get_submodule(name), rotation)
        for name in plan.joint:
            model.get_submodule(name).register_forward_hook(follow_joint)
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

    Replacements are looked for where they are now: an adapter may have wrapped or copied them, and
    whoever took blocks out of the model took them along.

    Raises:
        PatchError: the Linears behind a folded norm are not found; nothing was touched.
    """
    folded = folded_now(model, applied)
    names = dict(model.named_parameters(remove_duplicate=False))
    lost = [(f, ref) for f in folded for ref in f.step.linears if ref.weight not in names]
    if lost and arithmetic and unfold:
        raise PatchError(
            f"{lost[0][0].step.norm} was folded into {lost[0][1].module}, which is no longer in the model: "
            "put it back first"
        )
    for parent in list(model.modules()):
        for slot, current in list(parent._modules.items()):
            if current is not None and is_replacement(current):
                parent._modules[slot] = _original_of(current)
    for module in model.modules():
        release_input(module)
        release_adapter(module)
        release_rotary(module)
        release_weights(module)
    for one in reversed(folded):
        if arithmetic and unfold:
            unfold_step(model, one.step, one.gamma, one.beta)
        # who froze those Linears since then did not mean this norm to train
        if all(weight.requires_grad for weight in one.trained_with):
            for name in one.trained:
                model.get_parameter(name).requires_grad_(True)
    applied.folded.clear()


def folded_now(model: nn.Module, applied: Applied) -> list[Folded]:
    """The folded norms that are in the model still, with the names that they and their Linears have now:
    other blocks may have been taken out before them."""
    places: dict[str, str] = {}
    for name, module in model.named_modules():
        if is_replacement(module):
            places.setdefault(module.__dict__[_SITE], name)
    return [
        _moved(folded, places[folded.step.norm])
        for folded in applied.folded
        if folded.step.norm in places
    ]


def _moved(folded: Folded, place: str) -> Folded:
    """The same with the names of a norm that is now at ``place``."""
    before, now = folded.step.norm.split("."), place.split(".")
    while before and now and before[-1] == now[-1]:
        before.pop(), now.pop()
    if before == now:
        return folded
    old, new = ".".join(before), ".".join(now)

    def name(given: str) -> str:
        return new + given[len(old) :] if f"{given}.".startswith(f"{old}.") else given

    def maybe(given: str | None) -> str | None:
        return None if given is None else name(given)

    step = folded.step
    linears = tuple(
        LinearRef(name(ref.module), name(ref.weight), maybe(ref.bias), ref.transposed)
        for ref in step.linears
    )
    moved = FoldStep(place, maybe(step.weight), maybe(step.bias), step.weight_offset, linears)
    return dataclasses.replace(folded, step=moved, trained=tuple(map(name, folded.trained)))


def is_replacement(module: nn.Module) -> bool:
    """Whether the module was put in place of another one."""
    return ORIGINAL in module.__dict__


def _original_of(current: nn.Module) -> nn.Module:
    original: nn.Module = current.__dict__[ORIGINAL]
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
