"""Which norms can recover z = (y - beta) / gamma from their output y: looked at once a forward.

Where gamma comes near 0, or beta is large against it, the output does not tell z. Of a gamma that trains
nobody knows that beforehand, and some optimizers write without a trace (``.data``). So the values are looked
at when the model's forward begins: one small computation for all norms, one wait for the device.

A norm that was not looked at saves z, which is always right, and costs writing z and computing y again:
a part of the model that is called by itself, sharded weights, a CUDA graph under capture, torch.compile.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lowmem_patch.constants import NormSettings
from lowmem_patch.functional import in_compiler, is_exporting, is_transformed

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm

# y's rounding error grows by 1 + |beta/gamma| / |z| on the way to z
_LARGEST_SHIFT = 8.0
# below this share of the largest gamma, y underflows before z does
_SMALLEST_RATIO = 1e-4

_PLAIN = (Tensor, nn.Parameter)


class Look:
    """One look at gamma and beta, and what it told.

    Args:
        vectors: gamma and beta, each a tensor or None.

    Attributes:
        recovers_z: whether the output tells z.
    """

    __slots__ = ("_vectors", "recovers_z")

    def __init__(self, *vectors: Tensor | None) -> None:
        self._vectors = [_identity(vector) for vector in vectors if vector is not None]
        self.recovers_z = True

    def was_of(self, *vectors: Tensor | None) -> bool:
        """Whether these are the very tensors, and nobody wrote into them since; a write through ``.data``
        leaves no trace."""
        given = [vector for vector in vectors if vector is not None]
        if len(given) != len(self._vectors):
            return False
        for vector, (seen, address, version) in zip(given, self._vectors, strict=True):
            if seen() is not vector or vector.data_ptr() != address or vector._version != version:
                return False
        return True


def _identity(vector: Tensor) -> tuple[weakref.ref[Tensor], int, int]:
    # another tensor may come to lie at the address, sharded ones are gathered somewhere else
    return weakref.ref(vector), vector.data_ptr(), vector._version


class Looks:
    """The looks at one norm's gamma and beta; no attributes of the module, which take long to set.

    Attributes:
        last: the last one, None where a write may have left no trace since.
        of_forward: the one at whose gamma the running forward began.
        of_last_forward: that of the forward before, parts of which backward may run again.
        recovers_z: what the last one told, for torch.compile, under which nobody looks.
        assumed: what a look would tell, for a copy without data.
        smallest_ratio: of the least |gamma| to the largest, where the output tells z.
        largest_shift: of |beta / gamma| there.
    """

    __slots__ = (
        "assumed", "largest_shift", "last", "of_forward", "of_last_forward", "recovers_z", "smallest_ratio",
    )  # fmt: skip

    def __init__(
        self,
        recovers_z: bool = True,
        smallest_ratio: float = _SMALLEST_RATIO,
        largest_shift: float = _LARGEST_SHIFT,
    ) -> None:
        self.smallest_ratio, self.largest_shift = smallest_ratio, largest_shift
        self.last: Look | None = None
        self.of_forward: Look | None = None
        self.of_last_forward: Look | None = None
        self.recovers_z = recovers_z
        self.assumed: bool | None = None

    def __reduce__(self) -> Any:  # the tensors of a copy are others
        return Looks, (self.recovers_z, self.smallest_ratio, self.largest_shift)

    def tell_z(self, inverse: float, largest: float, shift: float) -> bool:
        """Whether the output tells z, from 1 / min |gamma|, max |gamma| and max |beta / gamma|."""
        few = inverse * largest > 1.0 / self.smallest_ratio
        return not (few or largest == 0.0 or shift > self.largest_shift)

    def forget(self) -> None:
        """Before gamma and beta are exchanged: torch swaps no tensors that are weakly referenced."""
        self.last = self.of_forward = self.of_last_forward = None

    def now(self) -> Look | None:
        """That of the forward that is running, or is run again in backward."""
        if self.of_forward is None and torch._C._current_graph_task_id() != -1:
            return self.of_last_forward
        return self.of_forward


def can_be_looked_at(*vectors: Tensor | None) -> bool:
    """Whether gamma and beta are ordinary tensors with data."""
    for vector in vectors:
        if vector is not None and (type(vector) not in _PLAIN or vector.is_meta):
            return False
    return True


def is_capturing(vector: Tensor) -> bool:
    """Whether a CUDA graph is under capture, in which nobody may wait for a value."""
    return vector.is_cuda and torch.cuda.is_current_stream_capturing()


def _largest(vectors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, in few kernels for all sizes together."""
    return list(torch._foreach_norm(tuple(vectors), math.inf))


def _extremes(pairs: list[tuple[Any, Any]], settings: NormSettings) -> Tensor:
    """Of norms that are alike, ``[3, norms]``: 1 / min |gamma|, max |gamma|, max |beta / gamma|."""
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    if weights[0] is None:
        shifts = _largest(biases)
        ones = [torch.ones_like(shift) for shift in shifts]
        return torch.stack([*ones, *ones, *shifts]).float().view(3, -1)
    offset = 1.0 - settings.identity_weight
    gammas = list(torch._foreach_add(weights, offset)) if offset else weights
    inverses = torch._foreach_reciprocal(gammas)
    shifts = _largest(torch._foreach_mul(inverses, biases)) if biases[0] is not None else []
    largest = _largest(gammas)
    shifts = shifts or [torch.zeros_like(one) for one in largest]
    return torch.stack([*_largest(inverses), *largest, *shifts]).float().view(3, -1)


def would_tell_z(weight: Tensor | None, bias: Tensor | None, settings: NormSettings) -> bool | None:
    """Whether the output of a norm with these gamma and beta tells z; None where nobody can look."""
    if (weight is None and bias is None) or not can_be_looked_at(weight, bias):
        return None
    with torch.no_grad():
        return Looks().tell_z(*_extremes([(weight, bias)], settings).flatten().tolist())


def look_at_gammas(norms: Iterable[MSNorm]) -> None:
    """Tell each norm whether its output tells z; waits for the device, once for each.

    Nobody looks under fake tensors and torch.func, nor where a CUDA graph is under capture.
    """
    if is_transformed() or detect_fake_mode(()) is not None:
        return
    by_device: dict[torch.device, dict[Any, list[MSNorm]]] = {}
    for norm in norms:
        weight, bias = norm.own_affine()
        one = bias if weight is None else weight
        norm.looks.last = None
        if one is None or not one.numel() or not can_be_looked_at(weight, bias):
            continue
        if is_capturing(one):
            continue
        alike = (norm.settings.identity_weight, weight is None, bias is None, one.dtype)
        by_device.setdefault(one.device, {}).setdefault(alike, []).append(norm)
    with torch.no_grad():
        for groups in by_device.values():
            parts = (
                _extremes([norm.own_affine() for norm in group], group[0].settings)
                for group in groups.values()
            )
            found = torch.cat([*parts], 1).tolist()
            asked = [norm for group in groups.values() for norm in group]
            for norm, *extremes in zip(asked, *found, strict=True):
                look = norm.looks.last = Look(*norm.own_affine())
                look.recovers_z = norm.looks.recovers_z = norm.looks.tell_z(*extremes)


def look_before_forward(norms: tuple[MSNorm, ...], model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a patched model: looks at the norms whose gamma trains."""
    if in_compiler() or is_exporting() or not torch.is_grad_enabled():
        return
    training = [norm for norm in norms if norm.trains()]
    look_at_gammas(training)
    for norm in training:
        norm.looks.of_forward = norm.looks.last


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
