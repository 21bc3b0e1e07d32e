"""Which norms can recover z = (y - beta) / gamma from their output y: looked at once a forward.

Where gamma comes near 0, or beta is large against it, the output does not tell z. Of a gamma that trains
nobody knows that beforehand, and some optimizers write without a trace (``.data``). So the values are looked
at when the model's forward begins: one small computation for all norms, one wait for the device.

A norm that was not looked at saves z, which is always right, and costs writing z and computing y again:
a part of the model that is called by itself, sharded weights, a CUDA graph under capture, torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm

__all__ = [
    "Checked",
    "check_before_forward",
    "check_gammas",
    "forget_after_forward",
    "is_capturing",
    "written",
]

# y's rounding error grows by 1 + |beta/gamma| / |z| on the way to z
_LARGEST_SHIFT = 8.0
# below this share of the largest gamma, y underflows before z does
_SMALLEST_RATIO = 1e-4

_PLAIN = (Tensor, nn.Parameter)

Written = tuple[tuple[int, int], ...]


class Checked:
    """What one norm was told of its gamma and beta; no attribute of a module, which takes long to set.

    Attributes:
        values: the gamma and beta that were looked at last, as :func:`written` tells them apart.
        in_forward: the same, while the forward runs at whose beginning they were looked at.
        in_last_forward: the same of the forward before, parts of which backward may run again.
        recovers_z: whether the output tells z.
    """

    __slots__ = ("in_forward", "in_last_forward", "recovers_z", "values")

    def __init__(self) -> None:
        self.values: Written | None = None
        self.in_forward: Written | None = None
        self.in_last_forward: Written | None = None
        self.recovers_z = True

    def of_this_forward(self) -> Written | None:
        """The values that the forward was told of that is running, or is run again in backward."""
        if self.in_forward is None and torch._C._current_graph_task_id() != -1:
            return self.in_last_forward
        return self.in_forward


def written(*vectors: Tensor | None) -> Written | None:
    """What changes when somebody writes into gamma or beta; None where their values cannot be looked at."""
    found = []
    for vector in vectors:
        if vector is None:
            continue
        if type(vector) not in _PLAIN or vector.is_meta:
            return None
        found.append((vector.data_ptr(), vector._version))
    return tuple(found)


def is_capturing(vector: Tensor) -> bool:
    """Whether a CUDA graph is under capture, in which nobody may wait for a value."""
    return vector.is_cuda and torch.cuda.is_current_stream_capturing()


def _largest(vectors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, in few kernels for all sizes together."""
    return list(torch._foreach_norm(tuple(vectors), math.inf))


def _extremes(norms: list[MSNorm]) -> Tensor:
    """Of norms that are alike, ``[3, norms]``: 1 / min |gamma|, max |gamma|, max |beta / gamma|."""
    pairs = [norm.own_affine() for norm in norms]
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    if weights[0] is None:
        shifts = _largest(biases)
        ones = [torch.ones_like(shift) for shift in shifts]
        return torch.stack([*ones, *ones, *shifts]).float().view(3, -1)
    offset = 1.0 - norms[0].settings.identity_weight
    gammas = list(torch._foreach_add(weights, offset)) if offset else weights
    inverses = torch._foreach_reciprocal(gammas)
    shifts = _largest(torch._foreach_mul(inverses, biases)) if biases[0] is not None else []
    largest = _largest(gammas)
    shifts = shifts or [torch.zeros_like(one) for one in largest]
    return torch.stack([*_largest(inverses), *largest, *shifts]).float().view(3, -1)


def _recovers(inverse: float, largest: float, shift: float) -> bool:
    """Whether the output tells z."""
    return not (
        inverse * largest > 1.0 / _SMALLEST_RATIO or largest == 0.0 or shift > _LARGEST_SHIFT
    )


def check_gammas(norms: Iterable[MSNorm]) -> None:
    """Tell each norm whether its output tells z; waits for the device, once for each."""
    by_device: dict[torch.device, dict[Any, list[MSNorm]]] = {}
    for norm in norms:
        weight, bias = norm.own_affine()
        one = bias if weight is None else weight
        values = None if one is None else written(weight, bias)
        if values is None or not one.numel() or is_capturing(one):
            norm.checked.values = None
            continue
        norm.checked.values = values
        alike = (norm.settings.identity_weight, weight is None, bias is None, one.dtype)
        by_device.setdefault(one.device, {}).setdefault(alike, []).append(norm)
    with torch.no_grad():
        for groups in by_device.values():
            found = torch.cat([_extremes(group) for group in groups.values()], 1).tolist()
            asked = [norm for group in groups.values() for norm in group]
            for norm, *extremes in zip(asked, *found, strict=True):
                norm.checked.recovers_z = _recovers(*extremes)


def check_before_forward(norms: tuple[MSNorm, ...], model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a patched model: looks at the norms whose gamma trains."""
    if in_compiler() or not torch.is_grad_enabled():
        return
    training = [norm for norm in norms if norm.trains()]
    check_gammas(training)
    for norm in training:
        norm.checked.in_forward = norm.checked.values


def forget_after_forward(
    norms: tuple[MSNorm, ...], model: nn.Module, args: Any, output: Any
) -> None:
    """Forward hook: from here on somebody may write unseen."""
    if in_compiler():
        return
    for norm in norms:
        checked = norm.checked
        if checked.in_forward is not None:
            checked.in_last_forward, checked.in_forward = checked.in_forward, None
