"""Which norms can recover z = (y - beta) / gamma from their output y: checked once a forward.

Where gamma comes near 0, or beta is large against it, the output does not tell z. Of a gamma that trains
nobody knows that beforehand, and some optimizers write without a trace (``.data``). So the values are checked
when the model's forward begins: one small computation for all norms.

A forward that waited for the answer would wait for the whole step before. So it goes on with what it expects
(`GammaChecks.expect`) where gamma moves as it did from step to step and was far from 0 there, and the norm's
backward, for which the answer has long come, asks whether that was so (`GammaChecks.confirm`). Anywhere else,
after a write that no optimizer made, say, the host waits.

A norm that was not checked saves z, which is always right, and costs writing z and computing y again:
a part of the model that is called by itself, sharded weights, a CUDA graph under capture, torch.compile. In a
block that runs again in backward a norm saves what it saved in the first run (`GammaChecks.decided`).

Gamma and beta that were folded into the next Linears may not change at all (`refuse_changes`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lowmem_patch.errors import PatchError, UnfoldedWeightsError
from lowmem_patch.functional import (
    in_compiler,
    is_transformed,
    without_autocast,
    without_dispatch_modes,
)
from lowmem_patch.nn.context import is_freed, is_fsdp_unit, train, trains_here
from lowmem_patch.nn.gamma_checks import Extremes, GammaCheck, Reading

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm

_PLAIN = (Tensor, nn.Parameter)
Affined = tuple["MSNorm", Any, Any]  # a norm with its gamma and beta


def can_be_checked(*vectors: Tensor | None) -> bool:
    """Whether gamma and beta are ordinary tensors with data, whole: between its forwards FSDP1 frees them, or
    has parts of them."""
    given = [vector for vector in vectors if vector is not None]
    if any(type(v) not in _PLAIN or v.is_meta or is_freed(v) for v in given):
        return False
    return len({vector.shape for vector in given}) <= 1


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is under capture, in which nobody may wait for a value."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _extremes(group: list[Affined], turned: tuple[int, int] | None) -> Tensor:
    """``[4, norms]`` of norms that are alike: 1 / min |gamma|, max |gamma|, max |beta / gamma|, and the least
    ratio of the gammas in a pair of columns that a rotation turns."""
    norms, weights, biases = zip(*group, strict=True)
    identity = norms[0].settings.identity_weight
    if weights[0] is None:
        shifts = torch.stack(biases).abs_().amax(1).float()
        ones = torch.ones_like(shifts)
        return torch.stack([ones, ones, shifts, ones])
    gammas = torch.stack(weights)
    if identity != 1.0:
        gammas.add_(1.0 - identity)
    if biases[0] is None:
        shift = gammas.new_zeros(len(group))
    else:
        shift = torch.stack(biases).div_(gammas).abs_().amax(1)
    least, largest = gammas.abs_().aminmax(dim=1)
    if turned is None:
        pair = torch.ones_like(largest)
    else:
        width, rotated = turned
        first, second = gammas.view(len(gammas), -1, width)[..., :rotated].chunk(2, -1)
        pair = first.div(second).minimum(second.div(first)).amin((1, 2))
    return torch.stack([least.reciprocal_(), largest, shift, pair]).float()


def tells_z_turned(norm: MSNorm, width: int, rotated: int) -> bool:
    """Whether what a rotation makes of a norm's output tells z, too; waits for the device the first time.

    Args:
        width: of a head.
        rotated: the columns of it that turn.
    """
    weight, bias = norm.own_affine()
    if weight is None and bias is None:
        return True
    checks = norm.gamma_checks
    if checks.pairs != (width, rotated):
        checks.pairs = width, rotated
        check_gammas([norm])
        if checks.of_forward is not None:
            checks.of_forward = checks.last
    check = checks.of_forward or checks.last or checks.of_last_forward
    # of a gamma for whose check the forward does not wait, the forward before is asked
    if check is not None and check.expected is not None and checks.of_last_forward is not None:
        check = checks.of_last_forward
    return check is not None and check.found().tell_z_turned()


def assume_gammas(model: nn.Module, shadow: nn.Module, *, gathered: bool = False) -> None:
    """Tell the norms of a patched shadow, which has no data, what the gammas and betas of the model are like.

    Args:
        gathered: by FSDP2, under which nobody checks them.
    """
    modules = dict(model.named_modules())
    for name, norm in shadow.named_modules():
        checks = getattr(norm, "gamma_checks", None)
        if checks is None or norm.folded or name not in modules:
            continue
        weight, bias = (modules[name]._parameters.get(own) for own in norm.names)
        look = partial(_look, norm, weight, bias)
        found = None if gathered else look(None)
        checks.assumed = False if gathered else None if found is None else checks.tells_z(found)
        checks.look = look


def _look(
    norm: MSNorm, weight: Tensor | None, bias: Tensor | None, turned: tuple[int, int] | None
) -> Extremes | None:
    """What a check of a gamma and a beta would find; None where nobody can check."""
    one = bias if weight is None else weight
    if one is None or not can_be_checked(weight, bias):
        return None
    with torch.no_grad(), without_dispatch_modes(), without_autocast(one.device.type):
        found = _extremes([(norm, weight, bias)], turned)
        return Extremes.of(*found.flatten().tolist())


def check_gammas(norms: Iterable[MSNorm]) -> None:
    """Let each norm know whether its output tells z; waits for the device, once for each."""
    whole = []
    for norm in norms:
        weight, bias = norm.own_affine()
        norm.gamma_checks.last = None
        if can_be_checked(weight, bias):
            whole.append((norm, weight, bias))
    _start_checks(whole)
    for norm, *_ in whole:
        if norm.gamma_checks.last is not None:
            norm.gamma_checks.told(norm.gamma_checks.last)


def _start_checks(norms: Iterable[Affined]) -> None:
    """Have the devices check gamma and beta, which are whole. Nobody checks under fake tensors and
    torch.func, nor where a CUDA graph is under capture."""
    if is_transformed() or detect_fake_mode(()) is not None:
        return
    with torch.no_grad(), without_dispatch_modes():
        for device, groups in _alike(norms).items():
            if is_capturing(device):
                continue
            with without_autocast(device.type):  # to float16, which stacks no bfloat16
                pairs = [group[0][0].gamma_checks.pairs for group in groups.values()]
                reading = Reading(torch.cat([*map(_extremes, groups.values(), pairs)], 1))
            for place, (norm, weight, bias) in enumerate(chain(*groups.values())):
                norm.gamma_checks.last = GammaCheck(weight, bias, reading=reading, place=place)


def _alike(norms: Iterable[Affined]) -> dict[torch.device, dict[Any, list[Affined]]]:
    """Norms with a gamma or beta in groups that are alike, by device."""
    alike: dict[torch.device, dict[Any, list[Affined]]] = {}
    for norm, weight, bias in norms:
        one = bias if weight is None else weight
        if one is not None and one.numel():
            absent, identity = (weight is None, bias is None), norm.settings.identity_weight
            kind = (*absent, one.dtype, one.numel(), identity, norm.gamma_checks.pairs)
            alike.setdefault(one.device, {}).setdefault(kind, []).append((norm, weight, bias))
    return alike


def check_before_forward(norms: tuple[MSNorm, ...], model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a patched model: checks the norms whose gamma trains."""
    if in_compiler() or not trains_here():
        return
    training, whole = [], []
    for norm in norms:
        weight, bias = norm.own_affine()
        checks, can_check = norm.gamma_checks, can_be_checked(weight, bias)
        checks.gathered = not can_check
        if train(weight, bias):
            checks.last = None
            training.append((norm, weight, bias))
            if can_check:
                whole.append((norm, weight, bias))
    _start_checks(whole)
    for norm, weight, bias in training:
        checks = norm.gamma_checks
        checks.of_forward = check = checks.last
        if check is not None:
            one = bias if weight is None else weight
            checks.expect(check, one.is_leaf and one.grad is not None)


def forget_after_forward(
    norms: tuple[MSNorm, ...], model: nn.Module, args: Any, output: Any
) -> None:
    """Forward hook: from here on somebody may write unseen."""
    if in_compiler():
        return
    for norm in norms:
        checks = norm.gamma_checks
        if checks.of_forward is not None:
            checks.of_last_forward, checks.of_forward, checks.last = checks.of_forward, None, None


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
    if torch.is_grad_enabled() and train(norm.weight, norm.bias):
        raise PatchError(
            "a norm whose affine was folded into the next Linears was set to train (requires_grad), which "
            "would have no effect: call patch_model again, after the last change of what trains and after "
            "get_peft_model"
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
