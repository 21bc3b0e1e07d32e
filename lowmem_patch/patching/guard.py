"""Weights of folded Linears are refused where they come without the norm that was folded into them.

A folded Linear's weight has another meaning than the stock one's. What is loaded into both is told by the
norm, which is an identity in a folded model and nowhere else; what is loaded into the Linear alone is told
by nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lowmem_patch.errors import UnfoldedWeightsError
from lowmem_patch.patching.sites import FoldStep

__all__ = ["guard_weights", "refuse_without_norm", "release_weights"]


def guard_weights(model: nn.Module, step: FoldStep) -> None:
    """Watch what is loaded into the Linears of one folded norm, also through a submodule."""
    norm = step.weight or step.bias
    if norm is None:
        return
    for linear in step.linears:
        for name in filter(None, (linear.weight, linear.bias)):
            holder: Any = model.get_submodule(name.rpartition(".")[0])  # has no types
            holder._register_load_state_dict_pre_hook(partial(_refuse, norm, name))


def release_weights(module: nn.Module) -> None:
    """Take the watch off again."""
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if _is_guard(hook):
            del module._load_state_dict_pre_hooks[key]


def refuse_without_norm(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Ask a module's guards before anything is loaded into the model around it.

    Raises:
        UnfoldedWeightsError: its weight is to be loaded, and the folded norm is not.
    """
    for hook in module._load_state_dict_pre_hooks.values():
        if _is_guard(hook):
            hook(state_dict, prefix)


def _is_guard(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps what it registers
    return isinstance(function, partial) and function.func is _refuse


def _refuse(norm: str, name: str, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    given = prefix + name.rpartition(".")[2]
    if given not in state_dict:
        return
    plain = given.replace("base_layer.", "")
    if plain.endswith(name):  # loaded through a wrapper, or through the model itself
        beside: str | None = plain.removesuffix(name) + norm
    elif name.endswith(plain):  # through a submodule, which may not hold the norm
        outside = name.removesuffix(plain)
        beside = norm.removeprefix(outside) if norm.startswith(outside) else None
    else:
        return  # the block has another place now
    if beside is None or beside not in state_dict:
        raise UnfoldedWeightsError(
            f"{given} is to be loaded without {norm}, whose affine was folded into it: load both, into an "
            "unpatched model (unpatch_model), and patch again"
        )
