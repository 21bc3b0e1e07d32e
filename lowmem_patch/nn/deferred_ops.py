"""The deferred ops: activation, gated product, norm behind row moves, a tensor kept anyway, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import (
    ActivationKind,
    activation,
    activation_grouped_matmul,
    activation_linear,
    compiled,
    draw_dropout,
    dropout_linear,
    glu,
    kept_linear,
    kept_matmul,
    packed_dropout,
)
from lowmem_patch.nn.context import autocast_dtype
from lowmem_patch.nn.deferred import Deferred, Projection, value_of
from lowmem_patch.nn.narrow import attached_copy

__all__ = ["DeferredActivation", "DeferredNorm", "Dropped", "Kept", "KeptMatrix"]


class DeferredActivation(Deferred):
    """``act(x)`` or, with two sources, ``act(gate) * up``; elementwise, gradients exact.

    Autograd keeps the sources; the value is recomputed from them where a weight gradient needs it.
    """

    def __init__(
        self, sources: tuple[Tensor, ...], kind: ActivationKind, lowers: bool = False
    ) -> None:
        dtype = sources[0].dtype
        for other in sources[1:]:
            dtype = torch.promote_types(dtype, other.dtype)
        super().__init__(sources, dtype, lowers)
        self.kind = kind

    def compute(self) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if len(self.sources) == 1:
            one = compiled.activation if compiling else activation
            return one(self.sources[0], self.kind)
        gated = compiled.glu if compiling else glu
        return gated(self.sources[0], self.sources[1], self.kind)

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        return DeferredActivation(sources, self.kind, self.lowers)

    def times(self, other: Any) -> Any:
        gates = (
            len(self.sources) == 1
            and isinstance(other, Tensor)
            and other.shape == self.sources[0].shape
        )
        if gates and self._value is None and other.is_floating_point() and not self.is_written():
            self._passed_on = True
            return DeferredActivation((self.sources[0], other), self.kind, self.lowers)
        return self.value() * value_of(other)

    def linear(self, to: Projection, dtype: torch.dtype) -> Tensor:
        if torch.compiler.is_compiling() and to.adapter is None:
            return _plain_linear(self.value(), to, dtype)
        if to.adapter is None and not to.weight.requires_grad:
            # the value's own node keeps the sources; who else reads the value shares its gradient
            return Kept(self.value()).linear(to, dtype)
        hidden = self.value_alone()
        self._passed_on = True
        return activation_linear(
            hidden, self.sources, to.weight, to.bias, self.kind, dtype, to.adapter
        )

    def dropped(self, whole: Deferred, p: float) -> Any:
        return None if torch.compiler.is_compiling() else Dropped(whole, self.sources, self.kind, p)

    def grouped(self, func: Callable[..., Any], weight: Tensor, offsets: Tensor) -> Any:
        if weight.dim() != 3 or torch.compiler.is_compiling():
            return None
        return activation_grouped_matmul(
            func, self.value(), self.sources, weight, offsets, self.kind
        )


class Kept(Deferred):
    """A tensor that autograd keeps anyway, so that casts of it need not be kept as well."""

    bypassed = False  # all gradients pass through the tensor
    watches = False

    def __init__(self, tensor: Tensor, lowers: bool = False) -> None:
        super().__init__((tensor,), tensor.dtype, lowers)

    def compute(self) -> Tensor:
        return self.sources[0]

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        return Kept(sources[0], self.lowers)

    def dropped(self, whole: Deferred, p: float) -> Any:
        return None if torch.compiler.is_compiling() else Dropped(whole, (self.value(),), None, p)

    def linear(self, to: Projection, dtype: torch.dtype) -> Tensor:
        value = self.value()
        if torch.compiler.is_compiling() and to.adapter is None:
            return _plain_linear(value, to, dtype)
        if to.adapter is None and value.dtype == dtype and _suits(to.weight, dtype):
            return F.linear(value, to.weight, to.bias)
        return kept_linear(value, to.weight, to.bias, dtype, to.adapter)


class Dropped(Deferred):
    """A dropout, whose mask is drawn at once: the random numbers are those of unpatched code.

    A Linear that trains keeps the mask in bits and what the dropout's input is computed from; any other
    reader gets the value, whose own node keeps the bits alone.

    Args:
        whole: the dropout's input.
        sources, kind: what ``whole`` is computed from, as `dropout_linear` wants it.
        p: the probability, above 0 and below 1.
    """

    bypassed = False
    watches = False  # the value is drawn; of the sources, the whole knows

    def __init__(
        self, whole: Deferred, sources: tuple[Tensor, ...], kind: ActivationKind | None, p: float
    ) -> None:
        super().__init__(sources, whole.dtype, whole.lowers)
        self.parent: Deferred = whole
        self.kind = kind
        self.p = p
        self.drawn, self.bits = draw_dropout(whole.value(), p)

    def compute(self) -> Tensor:
        return packed_dropout(self.parent.value(), self.drawn, self.bits, self.p)

    def dropped(self, whole: Deferred, p: float) -> Any:
        return Dropped(whole, (self.value(),), None, p)

    def linear(self, to: Projection, dtype: torch.dtype) -> Tensor:
        weight, bias, adapter = to
        if adapter is not None:
            low = self.linear(Projection(adapter.down, None), dtype)
            product = kept_linear(low, adapter.up, None, dtype) * adapter.scale
            return self.linear(Projection(weight, bias), dtype) + product
        if not weight.requires_grad:
            return Kept(self.value()).linear(to, dtype)
        sources = self.sources
        if self.kind is None and (copy := attached_copy(sources[0])) is not None:
            # what the norm keeps: the product is rounded to that in any case
            sources = (copy,) if copy.dtype == dtype else sources
        settings = (self.p, self.kind, dtype)
        return dropout_linear(self.value(), sources, self.bits, weight, bias, *settings)

    def _move(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return None  # the bits lie in the order of the rows as they are


def _suits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's own Linear serves: it costs less time than ours, and under autocast keeps a
    narrow copy of the weight, which only one that trains is worth."""
    if weight.dtype == dtype:
        return True
    return weight.requires_grad and torch.is_autocast_enabled(weight.device.type)


def _plain_linear(value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """What a compiler sees of a Linear. One with an adapter stays the operator that it is: of three
    products and two sums the compiler makes four more passes over the output."""
    autocast = torch.is_autocast_enabled(value.device.type)
    if not autocast and (value.dtype != dtype or to.weight.dtype != dtype):
        return compiled.linear(value, to.weight, to.bias, dtype)  # a cast waited, a wider adapter's
    weight = to.weight if to.weight.dtype == dtype else compiled.cast(to.weight, dtype)
    return F.linear(value, weight, to.bias)


class DeferredNorm(Kept):
    """A norm that waits behind row moves, so that it and its Linear keep one tensor between them."""

    bypassed = watches = True  # its value is computed from the tensor

    def __init__(
        self,
        source: Tensor,
        dtype: torch.dtype,
        norm: Callable[[Tensor], Tensor],
        lowers: bool = False,
    ) -> None:
        super().__init__(source, lowers)
        self.dtype = dtype
        self.norm = norm

    def compute(self) -> Tensor:
        return self.norm(self.sources[0])

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        return DeferredNorm(sources[0], self.dtype, self.norm, self.lowers)


class KeptMatrix(Kept):
    """A wide matrix whose product with another is computed in autocast's dtype, without a kept cast."""

    def _known(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in ("matmul", "__matmul__") and len(args) == 2 and not kwargs:
            left, right = self.sources[0], args[1]
            narrow = autocast_dtype(left.device.type, left.dtype)
            if (
                isinstance(right, Tensor)
                and left.dim() == right.dim() > 2
                and left.shape[:-2] == right.shape[:-2]
                and narrow is not None
                and torch.is_grad_enabled()
                and not self.is_written()
            ):
                return kept_matmul(left, right, narrow)
            return None
        return super()._known(func, name, args, kwargs)

    def __matmul__(self, other: Any) -> Any:
        return Deferred.__torch_function__(Tensor.__matmul__, (), (self, other), {})
