"""A tensor that several Linears read, whose gradient they add up while they compute it.

Each reader of a tensor gives a gradient of its own, and autograd adds them up: a pass that reads two and
writes one, for each reader but the first. Here readers get the tensor through a node that nobody else reads:

    through = x,    d_x = sum_i d_i,    d_i = dy_i W_i + s_i dy_i B_i A_i

The reader whose backward runs first returns d_i, as without this; each later one adds its products to what
that one returned, and returns nothing. All else a reader does and saves itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lowmem_patch.functional import _library

_task: Any = torch._C._current_graph_task_id  # has no types
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class GradientSum:
    """What the readers of one tensor have returned, in each backward that is under way.

    Autograd alone holds that tensor. Where it has added another gradient to it in memory of its own, the
    tensor is gone, and nothing is added to it any more.
    """

    def __init__(self) -> None:
        self._returned: dict[int, TensorWeakRef] = {}

    def returned(self) -> Tensor | None:
        """What the first reader returned in this backward."""
        found = self._returned.get(_task())
        return None if found is None else found()

    def begin(self, gradient: Tensor) -> None:
        """A reader returns this; of a backward's readers, only the first one's is known."""
        self._returned.setdefault(_task(), TensorWeakRef(gradient))


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # the same memory and version, and no view of x, which would hold it

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


_through = _library.direct_call(_Through)


class SharedInput:
    """A tensor through a node of its own.

    Attributes:
        tensor: ``x`` for its readers.
    """

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor = _through(x)
        self.tensor.gradient_sum = GradientSum()  # read by `sum_of`
        self._place = _place(x)

    def is_of(self, x: Tensor) -> bool:
        """Whether ``x`` is the tensor still, unwritten, and read on the stream of the first reader.

        A backward runs on the streams of its forward, and nobody waits for who adds to a gradient.
        """
        return self._place == _place(x)

    @staticmethod
    def serves(x: Tensor) -> bool:
        """Whether readers of ``x`` can add up its gradient."""
        # a leaf would hold itself
        return x.grad_fn is not None and x.device.type in ("cpu", "cuda") and _library.is_eager(x)


def _place(x: Tensor) -> tuple[int, int, int]:
    stream = _raw_stream(x.device.index) if x.is_cuda else 0
    return x.data_ptr(), x._version, stream


def sum_of(x: Tensor) -> GradientSum | None:
    """Where the readers of ``x`` add up its gradient; None where autograd does."""
    return getattr(x, "gradient_sum", None)
