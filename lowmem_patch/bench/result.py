"""The result of a comparison, as plain data."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant; bytes on a device are above those held before the step.

    Attributes:
        act: bytes held between forward and backward; on the CPU those that autograd saves.
        peak, reserved: the most bytes allocated by tensors, and by the allocator; None on the CPU.
        times: of every timed step, in milliseconds.
        kernels: the sum of the times of all kernels of a step, in milliseconds; None on the CPU.
        failed, skipped: the error, or the reason why the variant does not apply; then without numbers.
    """

    name: str
    act: int | None = None
    peak: int | None = None
    reserved: int | None = None
    times: tuple[float, ...] = ()
    failed: str | None = None
    skipped: str | None = None
    kernels: float | None = None

    @property
    def measured(self) -> bool:
        return bool(self.times)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Quartiles of the step time, in milliseconds; the second is the median."""
        if len(self.times) == 1:
            return (self.times[0],) * 3
        low, median, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return low, median, high

    @property
    def busy(self) -> float | None:
        """The share of a step in which kernels run, at most 1; the rest waits for Python and launches."""
        return None if self.kernels is None else min(1.0, self.kernels / self.quartiles[1])

    def to_dict(self, work: int) -> dict[str, Any]:
        """Plain data; ``work`` is the number of tokens, images or rows of a step."""
        if self.failed is not None:
            return {"error": self.failed}
        if self.skipped is not None:
            return {"skipped": self.skipped}
        low, median, high = self.quartiles
        return {
            "act_mib": _mib(self.act),
            "peak_mib": _mib(self.peak),
            "reserved_mib": _mib(self.reserved),
            "step_ms": median,
            "step_spread_ms": high - low,
            "kernels_ms": self.kernels,
            "per_second": 1000 * work / median,
        }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All variants on one device.

    Attributes:
        work, unit: the number of tokens, images or rows of a step, such as 8192 tokens.
        parked: whether models were moved to the host while another was measured, for lack of memory.
    """

    rows: tuple[Row, ...]
    device: str
    work: int
    unit: str
    rounds: int
    steps: int
    parked: bool

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        del data["rows"]
        return {**data, "variants": {row.name: row.to_dict(self.work) for row in self.rows}}
