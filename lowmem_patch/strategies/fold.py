"""fold: a norm's affine moves into the Linears behind it (MS-BP, arXiv 2406.16282), for those who ask for it.

The norm saves z, which is its output then. Gradients are exact, in other coordinates: the weights of the
Linears get another meaning, and whoever knows them by the old one is wrong. So it is legal only where
`lowmem_patch.strategies.fold_rules` finds nobody else; any other norm shares.

Weights of folded Linears are refused where they come without the norm that was folded into them. What is
loaded into both is told by the norm, which is an identity in a folded model and nowhere else; what is loaded
into the Linear alone is told by nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STOCK_NAMES
from lowmem_patch.errors import PatchError, UnfoldedWeightsError
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import Own
from lowmem_patch.strategies.fold_rules import FoldRules, has_data
from lowmem_patch.strategies.fold_weights import FoldStep, fold_step, identity_affine, unfold_step
from lowmem_patch.strategies.norm_sites import norm_sites
from lowmem_patch.strategies.protocol import Facts, Found, Skip, Target
from lowmem_patch.strategies.share import SharedNorm, share_or_skip, shared_norm
from lowmem_patch.tracing.consumers import LinearRef

_FOLDED = "_lowmem_patch_folded"  # where a folded norm holds what is needed to unfold it


@dataclasses.dataclass
class Folded:
    """What is needed to unfold one norm: its affine, and which of its parameters trained."""

    step: FoldStep
    gamma: Tensor | None
    beta: Tensor | None
    trained: tuple[str, ...]
    trained_with: tuple[nn.Parameter, ...]  # weights of the Linears that trained then
    linears: tuple[nn.Module, ...]  # in the order of the step's


@dataclasses.dataclass(frozen=True)
class FoldedNorm(SharedNorm):
    """A norm whose affine is in its Linears."""

    folded = True

    step: FoldStep

    def apply(self, target: Target) -> None:
        super().apply(target)
        model, step = target.model, self.step
        names = [name for name in (step.weight, step.bias) if name is not None]
        trained = tuple(name for name in names if model.get_parameter(name).requires_grad)
        weights = (model.get_parameter(linear.weight) for linear in step.linears)
        trained_with = tuple(weight for weight in weights if weight.requires_grad)
        gamma, beta = fold_step(model, step) if target.arithmetic else (None, None)
        own = model.get_submodule(self.site).__dict__
        linears = tuple(model.get_submodule(linear.module) for linear in step.linears)
        own[_FOLDED] = Folded(step, gamma, beta, trained, trained_with, linears)
        for name in names:
            # an identity that nothing reads: DDP must not wait for its gradient, nor an optimizer move
            # it by one that is left over
            identity = model.get_parameter(name).requires_grad_(False)
            identity.grad = None
        _guard_weights(model, step)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every norm, folded where that is legal and shared elsewhere, if ``norms: fold`` is asked for."""
    found = Found()
    if config.norms != "fold":
        return found
    rules = FoldRules(facts)
    for site in norm_sites(facts, config):
        if isinstance(site, Skip):
            found.add(site)
            continue
        own = site.function is None and site.spec.names == STOCK_NAMES and site.spec.dim == -1
        step, why_not = rules.fold(site) if own else (None, "")
        if step is None:
            found.add(share_or_skip(facts, config, site, why_not))
            continue
        known = site.gamma is not None and has_data(site.gamma)
        if site.gamma is None or (
            known and identity_affine(site.gamma, site.beta, site.spec.settings)
        ):
            reason = "nothing left to fold: the affine is an identity"
        else:
            reason = "affine folded into its Linears: its weight and bias train no longer"
        shared = vars(shared_norm(facts, config, site, reason))
        found.add(FoldedNorm(**{**shared, "strategy": "fold"}, step=step))
    return found


# a norm's parameter and one of a Linear into which it went
_Pairs = tuple[tuple[str | None, str], ...]


def _guard_weights(model: nn.Module, step: FoldStep) -> None:
    """Watch what is loaded into folded Linears: through the model, a part of it, or one of them alone.

    Torch shows a module no keys but its own and its children's, so each module around them is watched.
    """
    watched: dict[str, dict[tuple[str | None, str], None]] = {}
    norm = step.weight or step.bias
    names = [name for ref in step.linears for name in (ref.weight, ref.bias) if name is not None]
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
    pairs: _Pairs, outermost: bool, state_dict: dict[str, Any], prefix: str, *args: Any
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


def folded_now(model: nn.Module) -> list[Folded]:
    """The folded norms that are in the model, with the names that they and their Linears have now: other
    blocks may have been taken out before them."""
    found: dict[str, Folded] = {}
    for place, module in model.named_modules():
        folded: Folded | None = module.__dict__.get(_FOLDED)
        if folded is not None and isinstance(module, MSNorm):
            found.setdefault(folded.step.norm, _moved(folded, place))  # an adapter may hold a copy
    return list(found.values())


def _moved(folded: Folded, place: str) -> Folded:
    """The same with the names of a norm that is now at ``place``."""
    before, now = folded.step.norm.split("."), place.split(".")
    while before and now and before[-1] == now[-1]:
        before.pop(), now.pop()
    if before == now:
        return folded

    def name(given: str) -> str:
        parts = given.split(".")
        moves = parts[: len(before)] == before
        return ".".join([*now, *parts[len(before) :]]) if moves else given

    def maybe(given: str | None) -> str | None:
        return None if given is None else name(given)

    step = folded.step
    linears = tuple(
        LinearRef(name(ref.module), name(ref.weight), maybe(ref.bias), ref.transposed)
        for ref in step.linears
    )
    moved = dataclasses.replace(
        step, norm=place, weight=maybe(step.weight), bias=maybe(step.bias), linears=linears
    )
    return dataclasses.replace(folded, step=moved, trained=tuple(map(name, folded.trained)))


def refuse_lost_linears(model: nn.Module, folded: list[Folded]) -> None:
    """Raise where a Linear into which a norm was folded is no longer in the model, or is another one now.

    Raises:
        PatchError: such a norm cannot be unfolded.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for one in folded:
        for linear, module in zip(one.step.linears, one.linears, strict=True):
            here = linear.weight in names
            if here and model.get_submodule(linear.module) is module:
                continue
            lost = (
                ", in whose place another module stands now: put that one back first"
                if here
                else ", which is no longer in the model: put it back first"
            )
            raise PatchError(f"{one.step.norm} was folded into {linear.module}{lost}")


def unfold(model: nn.Module, folded: list[Folded], *, arithmetic: bool) -> None:
    """Give each norm its affine again, and let it train as it did."""
    for one in reversed(folded):
        if arithmetic:
            unfold_step(model, one.step, one.gamma, one.beta)
        # who froze those Linears since then did not mean this norm to train
        if all(weight.requires_grad for weight in one.trained_with):
            for name in one.trained:
                model.get_parameter(name).requires_grad_(True)
