"""Carry out a plan on one model object, all or nothing, and undo it."""

from __future__ import annotations

from torch import nn

from lowmem_patch.errors import PatchError
from lowmem_patch.nn.own import remove_own
from lowmem_patch.planning.plan import Plan
from lowmem_patch.strategies.fold import folded_now, refuse_lost_linears, unfold
from lowmem_patch.strategies.protocol import Target
from lowmem_patch.strategies.swap import put_back


def apply_plan(model: nn.Module, plan: Plan, *, arithmetic: bool = True) -> None:
    """Carry out every patch of a plan, in place.

    Args:
        arithmetic: False swaps modules and computes no weight, for a shadow without data.

    Raises:
        PatchError: something failed; the model is as it was.
    """
    target = Target(model, arithmetic=arithmetic)
    try:
        for patch in plan.patches:
            patch.apply(target)
    except Exception as error:  # whatever went wrong, the model must be put back first
        undo(model, arithmetic=arithmetic)
        raise PatchError(
            f"the model was put back as it was, since patching failed: {error}"
        ) from error


def undo(model: nn.Module, *, arithmetic: bool = True, unfolds: bool = True) -> None:
    """Take back what patches left on the model, also after training, wherever it is now.

    Args:
        arithmetic: as of :func:`apply_plan`.
        unfolds: False leaves folded weights as they are.

    Raises:
        PatchError: the Linears behind a folded norm are not found; nothing was touched.
    """
    folded = folded_now(model)
    if arithmetic and unfolds:
        refuse_lost_linears(model, folded)
    put_back(model)
    for module in model.modules():
        remove_own(module)
    unfold(model, folded, arithmetic=arithmetic and unfolds)
