"""What is known of one norm's gamma and beta: whether its output y tells z = (y - beta) / gamma."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.functional import SavedAs, TorchCheckpointFrame, limits_of

# y's rounding error grows by 1 + |beta/gamma| / |z| on the way to z
_LARGEST_SHIFT = 8.0
# below this share of the largest gamma, y underflows before z does
_SMALLEST_RATIO = 1e-4
# where the output is stored in 8 bits; `limits_of` has twice the shift, of all
RATIO_IN_BITS, SHIFT_IN_BITS = 1 / 16, 1.0

# a rotated output tells z where no gamma is smaller than this share of its pair's; more with a beta
_SMALLEST_PAIR = 1 / 16

# nobody waits where gamma would stay this far from 0, as a share of the largest, for so many more steps
_FAR_RATIO, _FAR, _STEPS = 0.02, 4.0, 4

_CHANGED = (
    "lowmem_patch: gamma of a norm came near 0, or its beta far above gamma, in one step that looked like "
    "any other (a write through .data, or as many writes as in the steps before), so that what this forward "
    "saved no longer tells the norm's gradient: set the gradients to zero and run this step again, which "
    "will save more"
)


class Extremes(NamedTuple):
    """What is asked of one norm's gamma and beta.

    Attributes:
        shift, ratio: max |beta / gamma|, and min |gamma| / max |gamma|.
        pair: the same ratio of the two gammas of a pair that a rotation turns, the least of all pairs.
    """

    shift: float
    ratio: float
    pair: float

    @staticmethod
    def of(inverse: float, largest: float, shift: float, pair: float) -> Extremes:
        """From 1 / min |gamma| and max |gamma|."""
        return Extremes(shift, 1.0 / (inverse * largest) if largest else 0.0, pair)

    def tell_z_turned(self) -> bool:
        """Whether a rotated output tells z: one gamma's rounding error is divided by the other's."""
        return self.pair >= _SMALLEST_PAIR * (1.0 + self.shift)


_event: Any = torch.cuda.Event  # has no types


class Reading:
    """What a device computes of many gammas and betas at once, read by the host where it first asks.

    Args:
        found: ``[4, norms]``: 1 / min |gamma|, max |gamma|, max |beta / gamma|, the least ratio in a pair.
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


class GammaCheck:
    """One check of gamma and beta.

    Args:
        weight, bias: the vectors, each a tensor or None. They are held: another tensor may come to lie at the
            address of one that is gone.
        reading: what is found, None where nobody asks for that.
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

    def writes_since(self, earlier: GammaCheck) -> tuple[int, int] | None:
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
        assert self._reading is not None
        return self._reading.values()[self._place]


def _marks(weight: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    """Address and number of writes of each; FSDP and optimizers exchange what a parameter holds."""
    place, version = (0, 0) if weight is None else (weight.data_ptr(), weight._version)
    if bias is None:
        return place, version, 0, 0
    return place, version, bias.data_ptr(), bias._version


@dataclasses.dataclass(eq=False)
class GammaChecks:
    """The checks of one norm's gamma and beta; no attributes of the module, which take long to set.

    Attributes:
        last: the last one, None where a write may have left no trace since.
        of_forward: the one at whose gamma the running forward began.
        of_last_forward: that of the forward before, from which gamma's steps are known.
        recovers_z: what the last one told, for torch.compile, under which nobody checks.
        assumed: what a check would tell, for a copy without data.
        look: what a check would find there, for pairs of columns that a rotation turns.
        gathered: weights are sharded (FSDP2): gamma is whole for a block's run alone, and nobody checks.
        smallest_ratio: of the least |gamma| to the largest, where the output tells z.
        largest_shift: of |beta / gamma| there.
        pairs: which columns a rotation turns: the width of a head, and how many of these; None: not known.
    """

    recovers_z: bool = True
    smallest_ratio: float = _SMALLEST_RATIO
    largest_shift: float = _LARGEST_SHIFT
    last: GammaCheck | None = None
    of_forward: GammaCheck | None = None
    of_last_forward: GammaCheck | None = None
    assumed: bool | None = None
    look: Callable[[tuple[int, int]], Extremes | None] | None = None
    gathered: bool = False
    pairs: tuple[int, int] | None = None
    _before: tuple[Extremes, ...] = ()  # of the last three forwards
    _writes: tuple[int, ...] | None = None  # of one step
    # by block, then by gamma and beta
    _decided: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary)

    def __reduce__(self) -> Any:  # the tensors of a copy are others
        return GammaChecks, (self.recovers_z, self.smallest_ratio, self.largest_shift)

    def tells_z(self, found: Extremes) -> bool:
        return not (found.ratio < self.smallest_ratio or found.shift > self.largest_shift)

    def told(self, check: GammaCheck) -> bool:
        """Whether the output tells z of the gamma of ``check``; waits for the device."""
        self.recovers_z = self.tells_z(check.found())
        return self.recovers_z

    def saved_as(self, dtype: torch.dtype) -> SavedAs:
        """How exactly an output in ``dtype`` is saved. Within its limits it tells z, a little less accurately
        than where a forward waits."""
        if self.smallest_ratio > _SMALLEST_RATIO:
            return "bits"
        if dtype == torch.float16:
            return "half"
        return "low" if dtype.itemsize < 4 else "wide"

    def confirm(self, check: GammaCheck, dtype: torch.dtype) -> None:
        """Raise where the forward expected of ``check`` that the output, saved in ``dtype``, tells z, and z
        would be wrong."""
        found = check.found()
        self.recovers_z = self.tells_z(found)
        ratio, shift = limits_of(self.saved_as(dtype))
        if not (self.recovers_z or (found.ratio > ratio and found.shift < shift)):
            raise RuntimeError(_CHANGED)

    def expect(self, check: GammaCheck, accumulates: bool) -> None:
        """Set what the forward that begins may expect of its check, where it would wait for the answer.

        Args:
            check: at whose gamma it begins.
            accumulates: gamma has a gradient, to which this forward's will be added.
        """
        last = self.of_last_forward
        writes = None if last is None or not last.is_ready() else check.writes_since(last)
        if last is None or writes is None:
            self._before, self._writes = (), None
            return
        self._before = (*self._before[-2:], last.found())
        # a step of the optimizer, of which fused ones leave no trace, or none where gradients are accumulated
        as_usual = accumulates
        if any(writes) or not accumulates:
            as_usual, self._writes = writes == self._writes, writes
        if as_usual and len(self._before) == 3 and not check.is_known():
            check.expected = self._stays(*self._before)

    def _stays(self, first: Extremes, second: Extremes, now: Extremes) -> bool:
        """Whether the output will tell z for some more steps as long as these."""
        moved = max(abs(now.ratio - second.ratio), abs(second.ratio - first.ratio))
        shifted = max(abs(now.shift - second.shift), abs(second.shift - first.shift))
        far = now.ratio - _STEPS * moved > max(_FAR * self.smallest_ratio, _FAR_RATIO)
        return far and now.shift + _STEPS * shifted < self.largest_shift / 2

    def decided(
        self, block: TorchCheckpointFrame, decide: Callable[[], bool], *vectors: Tensor | None
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
