"""What nodes of one backward have in common: a gradient that they add up, a value that they read.

Each reader of a tensor gives a gradient of its own, and autograd adds them up: a pass that reads two and
writes one, for each reader but the first. Here Linears get the tensor through a node that nobody else reads:

    through = x,    d_x = sum_i dy_i W_i + [d_low_1, d_low_2, ...] [A_1; A_2; ...]

The reader whose backward runs first returns dy_i W_i; each later one adds its product to what that one
returned, and returns nothing. The node itself adds the adapters' products, all in one. All else a reader does
and saves itself.

A value that several nodes need again is made once for all of them (`SharedValue`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lowmem_patch.functional import _library

# of a tensor on a GPU: a pass over a smaller one takes less time than Python takes to save it
LEAST_BYTES = 16 << 20

_engine: Any = torch.autograd.Variable._execution_engine
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def is_worth_python(x: Tensor) -> bool:
    """Whether a pass over a tensor is worth some 50 us of Python; always on a CPU, where tests run."""
    return x.device.type == "cpu" or (x.is_cuda and x.nbytes >= LEAST_BYTES)


class _Backward:
    """What readers have left in one backward.

    Attributes:
        returned: the gradient that the first one returned. Autograd alone holds it: where that has added
            another one to it in memory of its own, it is gone, and nothing is added to it any more.
        factors: of each reader, d_low ``[rows, R]`` and A ``[R, F]``.
    """

    def __init__(self, gradient: Tensor) -> None:
        self.returned = TensorWeakRef(gradient)
        self.factors: list[tuple[Tensor, Tensor]] = []


class GradientSum:
    """What the readers of one tensor have left, in each backward that is under way."""

    def __init__(self) -> None:
        self._backwards: dict[int, _Backward] = {}

    def returned(self) -> Tensor | None:
        """What the first reader returned in this backward."""
        found = self._backwards.get(_library.backward_number())
        return None if found is None else found.returned()

    def leave(self, gradient: Tensor, d_low: Tensor, lora_A: Tensor) -> None:
        """A reader returns ``gradient``, or has added to what the first one returned.

        Args:
            gradient: ``[..., F]``.
            d_low, lora_A: ``[rows, R]`` and ``[R, F]``, whose product the node adds; nobody writes into them.
        """
        task = _library.backward_number()
        found = self._backwards.get(task)
        if found is None:
            found = self._backwards[task] = _Backward(gradient)
        found.factors.append((d_low, lora_A))

    def added_to(self, dy: Tensor) -> Tensor:
        """``dy``, which autograd has of the readers, and the products that they have left."""
        found = self._backwards.pop(_library.backward_number(), None)
        if found is None:
            return dy
        d_lows, lora_As = zip(*found.factors, strict=True)
        alone = len(d_lows) == 1
        left = d_lows[0] if alone else torch.cat(d_lows, 1)
        right = lora_As[0] if alone else torch.cat(lora_As)
        if found.returned() is not dy:  # others may read it
            dy = dy.clone(memory_format=torch.contiguous_format)
        dy.view(-1, dy.shape[-1]).addmm_(left, right)
        return dy


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: GradientSum) -> Tensor:
        _library.see_undefined(ctx)
        ctx.gradients = gradients
        return x.detach()  # the same memory and version, and no view of x, which would hold it

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        return None if dy is None else ctx.gradients.added_to(dy), None


_through = _library.direct_call(_Through)


class SharedInput:
    """A tensor through a node of its own.

    Attributes:
        tensor: ``x`` for its readers.
    """

    def __init__(self, x: Tensor) -> None:
        gradients = GradientSum()
        self.tensor: Tensor = _through(x, gradients)
        self.tensor.gradient_sum = gradients  # read by `sum_of`
        self._place = _place(x)

    def is_of(self, x: Tensor) -> bool:
        """Whether ``x`` is the tensor still, unwritten, and read on the stream of the first reader.

        A backward runs on the streams of its forward, and nobody waits for who adds to a gradient.
        """
        return self._place == _place(x)

    @staticmethod
    def serves(x: Tensor) -> bool:
        """Whether readers of ``x`` can add up its gradient."""
        if x.grad_fn is None or not _library.is_eager(x):  # a leaf would hold itself
            return False
        return is_worth_python(x)


def _place(x: Tensor) -> tuple[int, int, int]:
    stream = _raw_stream(x.device.index) if x.is_cuda else 0
    return x.data_ptr(), x._version, stream


def sum_of(x: Tensor) -> GradientSum | None:
    """Where the readers of ``x`` add up its gradient; None where autograd does."""
    return getattr(x, "gradient_sum", None)


class SharedValue:
    """Held from the first node that asks for it until the last one, or until the backward ends: a backward of
    a part of the graph may not come to the others."""

    __slots__ = ("__weakref__", "_savers", "_value", "_waiting")

    def __init__(self) -> None:
        self._savers = self._waiting = 0
        self._value: Tensor | None = None

    def saved(self) -> None:
        """One more node will ask."""
        self._savers += 1
        self._waiting += 1

    def value(self, make: Callable[[], Tensor]) -> Tensor:
        """The value, for one of those that saved it."""
        found = self._value
        if found is None:
            found = make()
            if torch._C._current_graph_task_id() == -1:
                return found  # somebody looks at what is saved
            if self._waiting > 1:
                _engine.queue_callback(partial(_let_go, weakref.ref(self)))
        self._waiting -= 1
        # with retain_graph they all come again
        self._value = found if self._waiting > 0 else None
        if self._waiting <= 0:
            self._waiting = self._savers
        return found


def _let_go(of: weakref.ref[SharedValue]) -> None:
    shared = of()
    if shared is not None:
        shared._value, shared._waiting = None, shared._savers
