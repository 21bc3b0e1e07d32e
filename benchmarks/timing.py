"""How device time and Python's time of one call are measured, and on which tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]

DTYPE = torch.bfloat16
QUEUED_CALLS = 10
PLUG_COPIES = 10  # of 1 GiB each, 0.5 ms: longer than queuing takes
REPEATS = 7
TINY_CALLS = 500


def tensor(*shape: int, dtype: torch.dtype = DTYPE, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)


class Timer:
    """Median device time of calls that are queued behind a copy longer than the queuing."""

    def __init__(self) -> None:
        self.source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        self.target = torch.empty_like(self.source)

    def microseconds(self, calls: list[Call]) -> float:
        count = -(-QUEUED_CALLS // len(calls)) * len(calls)
        results: list[Any] = [call() for call in calls]
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(PLUG_COPIES):
                self.target.copy_(self.source)
            start.record()
            for i in range(count):
                results[i % len(calls)] = calls[i % len(calls)]()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / count * 1000)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        """Bytes a second of a large device-to-device copy, read and written."""
        microseconds = self.microseconds([lambda: self.target.copy_(self.source)])
        return 2 * self.source.nbytes / (microseconds * 1e-6)


def wall_microseconds(call: Call) -> float:
    # the least: whatever else the processor does only adds
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TINY_CALLS):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / TINY_CALLS * 1e6)
    return min(times)
