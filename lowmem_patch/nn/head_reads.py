"""Who reads the logits of a head: what a report says of it, and what its next loss is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_WORTH_WAITING = 0.25  # of the labels are ignored


class HeadReads:
    """Who asked for the logits of a head; part of a report.

    Attributes:
        whole: how often they were computed whole, by the torch function that asked.
        ignored: the share of labels that were to be ignored, as far as it is known without waiting.
        not_deferred: why the logits are computed at once, where that is known since the patch.
    """

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()
        self.ignored = 0.0
        self.not_deferred = ""
        self._pending: tuple[Tensor, Any] | None = None  # a count on its way from the GPU

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pending": None}

    def selects(self, labels: Tensor, ignore_index: int) -> bool:
        """Whether rows with ignored labels shall be left out. On a GPU that means to wait for it, which is
        worth it where the last steps ignored many."""
        if not labels.is_cuda:
            return True
        if isinstance(labels, FakeTensor):
            return False  # there are no values, and nothing to wait for
        if torch.cuda.is_current_stream_capturing():
            return False
        if self._pending is not None and self._pending[1].query():
            self.ignored, self._pending = float(self._pending[0]), None
        if self._pending is None:
            share = (labels == ignore_index).float().mean()
            target = torch.empty((), pin_memory=True)
            target.copy_(share, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            event.record()
            self._pending = (target, event)
        return self.ignored > _WORTH_WAITING
