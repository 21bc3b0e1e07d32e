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

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lowmem_patch.constants import NormSettings
from lowmem_patch.functional import (
    CheckpointedBlock,
    in_compiler,
    is_exporting,
    is_transformed,
    unseen,
    without_autocast,
)
from lowmem_patch.nn.context import is_freed

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm

# y's rounding error grows by 1 + |beta/gamma| / |z| on the way to z
_LARGEST_SHIFT = 8.0
# below this share of the largest gamma, y underflows before z does
_SMALLEST_RATIO = 1e-4

_PLAIN = (Tensor, nn.Parameter)

# nobody waits where gamma would stay this far from 0, as a share of the largest, for so many more steps
_FAR_RATIO, _FAR, _STEPS = 0.02, 4.0, 4

# in one step; further z would not come back from an output in float32 (bfloat16 has the same exponents)
_LEAST_RATIO, _MOST_SHIFT = 1e-8, 1e3

_CHANGED = (
    "lowmem_patch: gamma of a norm came near 0, or its beta far above gamma, in one step that looked like "
    "any other (a write through .data, or as many writes as in the steps before), so that what this forward "
    "saved no longer tells the norm's gradient: set the gradients to zero and run this step again, which "
    "will save more"
)


class Extremes(NamedTuple):
    """What is asked of one norm's gamma and beta.

    Attributes:
        inverse, largest: 1 / min |gamma|, and max |gamma|.
        shift, ratio: max |beta / gamma|, and min |gamma| / max |gamma|.
    """

    inverse: float
    largest: float
    shift: float
    ratio: float

    @staticmethod
    def of(inverse: float, largest: float, shift: float) -> Extremes:
        product = inverse * largest
        return Extremes(inverse, largest, shift, 1.0 / product if product > 0.0 else 0.0)


_IDENTITY = Extremes.of(1.0, 1.0, 0.0)
_event: Any = torch.cuda.Event  # has no types


class Reading:
    """What a device computes of many gammas and betas at once, read by the host where it first asks.

    Args:
        found: ``[3, norms]``: 1 / min |gamma|, max |gamma|, max |beta / gamma|.
    """

    __slots__ = ("_done", "_found", "_values")

    def __init__(self, found: Tensor) -> None:
        self._found: Tensor | None = found
        self._done: Any = None
        self._values: list[Extremes] = []
        if found.is_cuda:
            self._found = found.to("cpu", non_blocking=True)
            self._done = _event()
            self._done.record(torch.cuda.current_stream(found.device))
        else:
            self.values()

    def is_ready(self) -> bool:
        """Whether nobody would have to wait."""
        return self._found is None or bool(self._done.query())

    def values(self) -> list[Extremes]:
        """The extremes of each norm; waits for the device."""
        if self._found is not None:
            if self._done is not None:
                self._done.synchronize()
            self._values = [*map(Extremes.of, *self._found.tolist())]
            self._found = None
        return self._values


class Look:
    """One look at gamma and beta.

    Args:
        weight, bias: the vectors, each a tensor or None. They are held: another tensor may come to lie at the
            address of one that is gone.
        reading: what is found, None where it is known that the output tells z.
        place: of the norm in ``reading``.

    Attributes:
        expected: what it will tell, as far as the forward knows; None: nobody knows, who asks waits.
    """

    __slots__ = ("_bias", "_marks", "_place", "_reading", "_weight", "expected")

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        reading: Reading | None = None,
        place: int = 0,
    ) -> None:
        self._weight, self._bias = weight, bias
        self._marks = _marks(weight, bias)
        self._reading, self._place = reading, place
        self.expected: bool | None = None

    def was_of(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether these are the very tensors, and nobody wrote into them since; a write through ``.data``
        leaves no trace."""
        same = weight is self._weight and bias is self._bias
        return same and _marks(weight, bias) == self._marks

    def writes_since(self, earlier: Look) -> tuple[int, int] | None:
        """How often gamma and beta were written since; None where they are other tensors."""
        if self._weight is not earlier._weight or self._bias is not earlier._bias:
            return None
        place, version, bias_place, bias_version = self._marks
        was, first, bias_was, bias_first = earlier._marks
        if place != was or bias_place != bias_was:
            return None
        return version - first, bias_version - bias_first

    def is_known(self) -> bool:
        """Whether the host has what was found, as on a CPU; asks no device."""
        return self._reading is None or self._reading._found is None

    def is_ready(self) -> bool:
        """Whether `found` would not wait."""
        return self._reading is None or self._reading.is_ready()

    def found(self) -> Extremes:
        """What was found; waits for the device."""
        if self._reading is None:
            return _IDENTITY
        return self._reading.values()[self._place]


def _marks(weight: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    """Address and number of writes of each; FSDP and optimizers exchange what a parameter holds."""
    place, version = (0, 0) if weight is None else (weight.data_ptr(), weight._version)
    if bias is None:
        return place, version, 0, 0
    return place, version, bias.data_ptr(), bias._version


class Looks:
    """The looks at one norm's gamma and beta; no attributes of the module, which take long to set.

    Attributes:
        last: the last one, None where a write may have left no trace since.
        of_forward: the one at whose gamma the running forward began.
        of_last_forward: that of the forward before, from which gamma's steps are known.
        recovers_z: what the last one told, for torch.compile, under which nobody looks.
        assumed: what a look would tell, for a copy without data.
        gathered: weights are sharded (FSDP2): gamma is whole for a block's run alone, and nobody looks.
        smallest_ratio: of the least |gamma| to the largest, where the output tells z.
        largest_shift: of |beta / gamma| there.
    """

    __slots__ = (
        "_before", "_decided", "_writes", "assumed", "gathered", "largest_shift", "last", "of_forward",
        "of_last_forward", "recovers_z", "smallest_ratio",
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
        self.gathered = False
        self._before: tuple[Extremes, ...] = ()  # of the last three forwards
        self._writes: tuple[int, ...] | None = None  # of one step
        self._decided: Any = weakref.WeakKeyDictionary()  # by block, then by gamma and beta

    def __reduce__(self) -> Any:  # the tensors of a copy are others
        return Looks, (self.recovers_z, self.smallest_ratio, self.largest_shift)

    def tells_z(self, found: Extremes) -> bool:
        """Whether the output tells z."""
        few = found.inverse * found.largest > 1.0 / self.smallest_ratio
        return not (few or found.largest == 0.0 or found.shift > self.largest_shift)

    def told(self, look: Look) -> bool:
        """Whether the output tells z of the gamma of ``look``; waits for the device."""
        self.recovers_z = self.tells_z(look.found())
        return self.recovers_z

    def confirm(self, look: Look, dtype: torch.dtype) -> None:
        """Raise where the forward expected of ``look`` that the output, saved in ``dtype``, tells z, and z
        would be wrong. Where it is a little less accurate than where a forward waits, it is not."""
        found = look.found()
        self.recovers_z = self.tells_z(found)
        in_bits = self.smallest_ratio > _SMALLEST_RATIO  # of 8-bit storage
        ratio = self.smallest_ratio if in_bits or dtype == torch.float16 else _LEAST_RATIO
        shift = 2 * self.largest_shift if in_bits or dtype.itemsize < 4 else _MOST_SHIFT
        if not (self.recovers_z or (found.ratio > ratio and found.shift < shift)):
            raise RuntimeError(_CHANGED)

    def expect(self, look: Look, accumulates: bool) -> None:
        """Set what the forward that begins may expect of its look, where it would wait for the answer.

        Args:
            look: at whose gamma it begins.
            accumulates: gamma has a gradient, to which this forward's will be added.
        """
        last = self.of_last_forward
        writes = None if last is None or not last.is_ready() else look.writes_since(last)
        if last is None or writes is None:
            self._before, self._writes = (), None
            return
        self._before = (*self._before[-2:], last.found())
        # a step of the optimizer, of which fused ones leave no trace, or none where gradients are accumulated
        as_usual = accumulates
        if any(writes) or not accumulates:
            as_usual, self._writes = writes == self._writes, writes
        if as_usual and len(self._before) == 3 and not look.is_known():
            look.expected = self._stays(*self._before)

    def _stays(self, first: Extremes, second: Extremes, now: Extremes) -> bool:
        """Whether the output will tell z for some more steps as long as these."""
        moved = max(abs(now.ratio - second.ratio), abs(second.ratio - first.ratio))
        shifted = max(abs(now.shift - second.shift), abs(second.shift - first.shift))
        far = now.ratio - _STEPS * moved > max(_FAR * self.smallest_ratio, _FAR_RATIO)
        return far and now.shift + _STEPS * shifted < self.largest_shift / 2

    def decided(
        self, block: CheckpointedBlock, decide: Callable[[], bool], *vectors: Tensor | None
    ) -> bool:
        """Whether a norm in a block that runs again saves z: as in the block's first run, whatever is known
        of gamma by then."""
        if block.frame is None:
            return True
        of_block = self._decided.setdefault(block.frame, {})
        key = tuple((v.data_ptr(), v._version) for v in vectors if v is not None)
        if key not in of_block:
            of_block[key] = True if block.again else decide()
        return bool(of_block[key])

    def forget(self) -> None:
        """Called before gamma and beta are exchanged: torch swaps no tensors that are weakly referenced."""
        self.last = self.of_forward = self.of_last_forward = None


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
    gammas = torch.stack(weights).add_(1.0 - settings.identity_weight)
    shift = gammas.new_zeros(len(pairs))
    if biases[0] is not None:
        shift = torch.stack(biases).div(gammas).abs_().amax(1)
    least, largest = gammas.abs_().aminmax(dim=1)
    return torch.stack([least.reciprocal_(), largest, shift]).float()


def would_tell_z(weight: Tensor | None, bias: Tensor | None, settings: NormSettings) -> bool | None:
    """Whether the output of a norm with these gamma and beta tells z; None where nobody can look."""
    one = bias if weight is None else weight
    if one is None or not can_be_looked_at(weight, bias):
        return None
    with torch.no_grad(), without_autocast(one.device.type):
        found = _extremes([(weight, bias)], settings)
    return Looks().tells_z(Extremes.of(*found.flatten().tolist()))


def look_at_gammas(norms: Iterable[MSNorm]) -> None:
    """Let each norm know whether its output tells z; waits for the device, once for each."""
    for norm in _start_looks(norms):
        assert norm.looks.last is not None
        norm.looks.told(norm.looks.last)


def _start_looks(norms: Iterable[MSNorm]) -> list[MSNorm]:
    """Have the devices look at gamma and beta; the norms that were looked at. Nobody looks under fake tensors
    and torch.func, nor where a CUDA graph is under capture."""
    if is_transformed() or detect_fake_mode(()) is not None:
        return []
    looked_at = []
    with torch.no_grad(), unseen():
        for device, groups in _alike(norms).items():
            with without_autocast(device.type):  # to float16, which stacks no bfloat16
                parts = [_extremes([(w, b) for _, w, b in g], g[0][0].settings) for g in groups]
                reading = Reading(torch.cat(parts, 1))
            asked = (each for group in groups for each in group)
            for place, (norm, weight, bias) in enumerate(asked):
                norm.looks.last = Look(weight, bias, reading=reading, place=place)
                looked_at.append(norm)
    return looked_at


def _alike(norms: Iterable[MSNorm]) -> dict[torch.device, list[list[tuple[MSNorm, Any, Any]]]]:
    """The norms that can be looked at, with gamma and beta, in groups that are alike, by device."""
    alike: dict[Any, list[tuple[MSNorm, Any, Any]]] = {}
    for norm in norms:
        weight, bias = norm.own_affine()
        one = bias if weight is None else weight
        norm.looks.last = None
        if one is not None and one.numel() and can_be_looked_at(weight, bias):
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
    if in_compiler() or is_exporting() or not torch.is_grad_enabled():
        return
    for norm in norms:
        norm.looks.gathered = not can_be_looked_at(*norm.own_affine())
    training = [norm for norm in norms if norm.trains()]
    _start_looks(training)
    for norm in training:
        looks = norm.looks
        looks.of_forward = look = looks.last
        if look is not None:
            weight, bias = norm.own_affine()
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
