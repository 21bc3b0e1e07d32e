"""Weights of folded Linears are refused where they come without the norm that was folded into them.

A folded Linear's weight has another meaning than the stock one's. What is loaded into both is told by the
norm, which is an identity in a folded model and nowhere else; what is loaded into the Linear alone is told
by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lowmem_patch.errors import UnfoldedWeightsError
from lowmem_patch.nn.own import Own
from lowmem_patch.strategies.fold_weights import FoldStep

Pairs = tuple[
    tuple[str | None, str], ...
]  # a norm's parameter and one of a Linear into which it went


def guard_weights(model: nn.Module, steps: Iterable[FoldStep]) -> None:
    """Watch what is loaded into folded Linears: through the model, a part of it, or one of them alone.

    Torch shows a module no keys but its own and its children's, so each module around them is watched.
    """
    watched: dict[str, dict[tuple[str | None, str], None]] = {}
    for step in steps:
        norm = step.weight or step.bias
        names = [
            name for ref in step.linears for name in (ref.weight, ref.bias) if name is not None
        ]
        for name in names if norm is not None else ():
            parts = name.split(".")
            for depth in range(len(parts)):
                around = "".join(f"{part}." for part in parts[:depth])
                inside = norm.removeprefix(around) if norm and norm.startswith(around) else None
                watched.setdefault(around, {})[inside, name.removeprefix(around)] = None
    for around, pairs in watched.items():
        module: Any = model.get_submodule(around.removesuffix("."))  # has no types
        hook = Own(_refuse, tuple(pairs), around == "")
        module._register_load_state_dict_pre_hook(hook)


def _refuse(
    pairs: Pairs, outermost: bool, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Hook before loading; a module inside is asked only where the loading begins with it."""
    if prefix and not outermost:
        return
    for norm, name in pairs:
        if prefix + name in state_dict and (norm is None or prefix + norm not in state_dict):
            raise UnfoldedWeightsError(
                f"{prefix}{name} is to be loaded without {norm or 'the norm'} whose affine was folded into "
                "it: load both into an unpatched model (unpatch_model), and patch that again"
            )
