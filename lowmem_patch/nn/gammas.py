"""Which norms can recover z = (y - beta) / gamma from their output y: looked at once a forward.

Where gamma comes near 0, or beta is large against it, the output does not tell z. Of a gamma that trains
nobody knows that beforehand, and some optimizers write without a trace (``.data``). So the values are looked
at when the model's forward begins: one small computation for all norms.

A forward that waited for the answer would wait for the whole step before. So it goes on with what it expects
(`Looks.expect`) where gamma moves as it did from step to step and was far from 0 there, and the norm's
backward, for which the answer has long come, asks whether that was so (`Looks.confirm`). Anywhere else,
after a write that no optimizer made, say, the host waits.

A norm that was not looked at saves z, which is always right, and costs writing z and computing y again:
a part of the model that is called by itself, sharded weights, a CUDA graph under capture, torch.compile. In a
block that runs again in backward a norm saves what it saved in the first run (`Looks.decided`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lowmem_patch.constants import NormSettings
from lowmem_patch.functional import (
    in_compiler,
    is_transformed,
    without_autocast,
    without_dispatch_modes,
)
from lowmem_patch.nn.context import is_freed, train, trains_here
from lowmem_patch.nn.looks import Extremes, Look, Reading

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm

_PLAIN = (Tensor, nn.Parameter)
Affined = tuple["MSNorm", Any, Any]  # a norm with its gamma and beta


def can_be_looked_at(*vectors: Tensor | None) -> bool:
    """Whether gamma and beta are ordinary tensors with data, whole: between its forwards FSDP1 frees them, or
    has parts of them."""
    given = [vector for vector in vectors if vector is not None]
    if any(type(v) not in _PLAIN or v.is_meta or is_freed(v) for v in given):
        return False
    return len({vector.shape for vector in given}) <= 1


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is under capture, in which nobody may wait for a value."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _extremes(pairs: list[tuple[Any, Any]], settings: NormSettings) -> Tensor:
    """``[3, norms]`` of norms that are alike: 1 / min |gamma|, max |gamma|, max |beta / gamma|."""
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    if weights[0] is None:
        shifts = torch.stack(biases).abs_().amax(1).float()
        ones = torch.ones_like(shifts)
        return torch.stack([ones, ones, shifts])
    gammas = torch.stack(weights)
    if settings.identity_weight != 1.0:
        gammas.add_(1.0 - settings.identity_weight)
    if biases[0] is None:
        shift = gammas.new_zeros(len(pairs))
    else:
        shift = torch.stack(biases).div_(gammas).abs_().amax(1)
    least, largest = gammas.abs_().aminmax(dim=1)
    return torch.stack([least.reciprocal_(), largest, shift]).float()


def would_tell_z(norm: MSNorm, weight: Tensor | None, bias: Tensor | None) -> bool | None:
    """Whether the output of ``norm`` would tell z of these gamma and beta; None where nobody can look."""
    one = bias if weight is None else weight
    if one is None or not can_be_looked_at(weight, bias):
        return None
    with torch.no_grad(), without_autocast(one.device.type):
        found = _extremes([(weight, bias)], norm.settings)
    return norm.looks.tells_z(Extremes.of(*found.flatten().tolist()))


def look_at_gammas(norms: Iterable[MSNorm]) -> None:
    """Let each norm know whether its output tells z; waits for the device, once for each."""
    whole = []
    for norm in norms:
        weight, bias = norm.own_affine()
        norm.looks.last = None
        if can_be_looked_at(weight, bias):
            whole.append((norm, weight, bias))
    for norm in _start_looks(whole):
        assert norm.looks.last is not None
        norm.looks.told(norm.looks.last)


def _start_looks(norms: Iterable[Affined]) -> list[MSNorm]:
    """Have the devices look at gamma and beta, which are whole; the norms that were looked at. Nobody looks
    under fake tensors and torch.func, nor where a CUDA graph is under capture."""
    if is_transformed() or detect_fake_mode(()) is not None:
        return []
    looked_at = []
    with torch.no_grad(), without_dispatch_modes():
        for device, groups in _alike(norms).items():
            with without_autocast(device.type):  # to float16, which stacks no bfloat16
                parts = [_extremes([(w, b) for _, w, b in g], g[0][0].settings) for g in groups]
                reading = Reading(torch.cat(parts, 1))
            asked = (each for group in groups for each in group)
            for place, (norm, weight, bias) in enumerate(asked):
                norm.looks.last = Look(weight, bias, reading=reading, place=place)
                looked_at.append(norm)
    return looked_at


def _alike(norms: Iterable[Affined]) -> dict[torch.device, list[list[Affined]]]:
    """Norms with a gamma or beta in groups that are alike, by device."""
    alike: dict[Any, list[Affined]] = {}
    for norm, weight, bias in norms:
        one = bias if weight is None else weight
        if one is not None and one.numel():
            absent, identity = (weight is None, bias is None), norm.settings.identity_weight
            kind = (*absent, one.dtype, one.numel(), identity)
            alike.setdefault((one.device, kind), []).append((norm, weight, bias))
    by_device: dict[torch.device, list[Any]] = {}
    for (device, _), group in alike.items():
        if not is_capturing(device):
            by_device.setdefault(device, []).append(group)
    return by_device


def look_before_forward(norms: tuple[MSNorm, ...], model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a patched model: looks at the norms whose gamma trains."""
    if in_compiler() or not trains_here():
        return
    training, whole = [], []
    for norm in norms:
        weight, bias = norm.own_affine()
        looks, looks_at = norm.looks, can_be_looked_at(weight, bias)
        looks.gathered = not looks_at
        if train(weight, bias):
            looks.last = None
            training.append((norm, weight, bias))
            if looks_at:
                whole.append((norm, weight, bias))
    _start_looks(whole)
    for norm, weight, bias in training:
        looks = norm.looks
        looks.of_forward = look = looks.last
        if look is not None:
            one = bias if weight is None else weight
            looks.expect(look, one.is_leaf and one.grad is not None)


def forget_after_forward(
    norms: tuple[MSNorm, ...], model: nn.Module, args: Any, output: Any
) -> None:
    """Forward hook: from here on somebody may write unseen."""
    if in_compiler():
        return
    for norm in norms:
        looks = norm.looks
        if looks.of_forward is not None:
            looks.of_last_forward, looks.of_forward, looks.last = looks.of_forward, None, None
