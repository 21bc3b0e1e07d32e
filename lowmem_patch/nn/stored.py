"""Tensors that hold their values and stand for an op, in a compiled graph too; Linears that read values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, without its import
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import (
    SharedInput,
    compiled,
    in_compiler,
    packer,
    recast_linear,
    see_undefined,
)
from lowmem_patch.nn.deferred import Deferred, Stored, Unstored
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.nn.watched import Watched


class Compiled(Stored):
    """A tensor in a compiled graph; it leaves the graph as an ordinary one, which any other graph takes."""

    @_disable_dynamo
    def _leave(self, _: Any) -> None:
        self.__class__ = Tensor  # type: ignore[assignment]  # torch does so with lazy parameters

    # (op, sources); a compiler reads what it was set to, and sets it once more outside
    recipe: Any = property(None, _leave)

    @property
    def op(self) -> Op:  # type: ignore[override]  # an attribute elsewhere
        made: Op = self.recipe[0]
        return made

    @property
    def sources(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # likewise
        found: tuple[Tensor, ...] = self.recipe[1]
        return found


class _Hold(torch.autograd.Function):
    """A fake tensor, which cannot become another subclass, as the value of a tensor without storage."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Unstored:
        see_undefined(ctx)
        h: Unstored = Tensor._make_wrapper_subclass(
            Unstored,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        return h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        return dy


def keep(
    tensor: Tensor, op: Op, sources: tuple[Tensor, ...] = (), *, passing: bool = False
) -> Deferred:
    """``tensor``, whose known readers read it as ``op`` says.

    ``passing``: the result only passes through a foreign forward, in the place of ``tensor``.
    """
    h: Any = tensor
    if in_compiler():
        h = tensor.as_subclass(Compiled)
        h.recipe, h._adapts = (op, sources), False  # a compiler reads no attribute of a class
        return h  # type: ignore[no-any-return]  # as_subclass has no types
    if isinstance(tensor, FakeTensor):
        h = _Hold.apply(tensor)  # type: ignore[no-untyped-call]  # of torch
        h.held, h._value, h._value_version = True, tensor.detach(), tensor._version
    else:
        h = tensor.as_subclass(Stored)
        h._first_version, h._origin = tensor._version, tensor if passing else None
    h.op, h.sources, h._adapts, h._packer = op, sources, False, packer()
    h._versions = [source._version for source in sources] if sources else None
    return h  # type: ignore[no-any-return]  # Any, since Function.apply and as_subclass have no types


def attach(
    tensor: Tensor, op: Op, sources: tuple[Tensor, ...] = (), *, watched: bool = False
) -> Deferred:
    """As `keep`, of a tensor that was just computed and that nobody else has: it becomes the result itself.

    In no compiled graph. ``watched``: others have the sources, and may write into them.
    """
    h: Any = tensor
    if type(tensor) is not Tensor:
        return keep(tensor, op, sources)
    h._first_version, h.op, h.sources, h._adapts = tensor._version, op, sources, False
    h._packer = packer()
    if watched:
        h._versions = [source._version for source in sources]
    h.__class__ = Stored  # as torch's lazy parameters do; a view would cost a node of autograd
    return h  # type: ignore[no-any-return]  # its class was assigned, which no type checker sees


def project(x: Tensor, to: Projection, dtype: torch.dtype) -> Any:
    """The projection of any tensor computed in ``dtype``, which saves as little as possible."""
    if isinstance(x, Deferred):
        return x.op.linear(x, to, dtype)
    if isinstance(x, Watched):
        x = read_input(x, x, to, dtype)
    if to.stored:
        return compiled.stored_linear((x,), *to[:3], dtype)
    return recast_linear(x, to.weight, to.bias, dtype, to.adapter)


def read_input(h: Deferred | Watched, value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """``value``, which is that of ``h``, or the tensor that several Linears read in its place."""
    if not to.shared or value.dtype != dtype or in_compiler() or not SharedInput.serves(value):
        return value
    if h._shared is None or not h._shared.is_of(value):
        h._shared = SharedInput(value)
    return h._shared.tensor


def saved_linear(value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """The projection of a tensor that is saved as it is given, or in 8 bits."""
    if to.stored:
        return compiled.stored_linear((value,), *to[:3], dtype)
    if to.adapter is None:
        if in_compiler():
            return plain_linear(value, to, dtype)
        if value.dtype == dtype and _torch_serves(to.weight, dtype):
            return F.linear(value, to.weight, to.bias)
    return recast_linear(value, to.weight, to.bias, dtype, to.adapter)


def _torch_serves(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's own Linear serves: it costs less time than ours, and under autocast keeps a
    low-precision copy of the weight, which only one that trains is worth."""
    if weight.dtype == dtype:
        return True
    return weight.requires_grad and torch.is_autocast_enabled(weight.device.type)


def plain_linear(value: Tensor, to: Projection, dtype: torch.dtype) -> Tensor:
    """What a compiler sees of a Linear. One with an adapter stays the operator that it is: of three
    products and two sums the compiler makes four more passes over the output."""
    autocast = torch.is_autocast_enabled(value.device.type)
    if not autocast and (value.dtype != dtype or to.weight.dtype != dtype):
        return compiled.linear(value, to.weight, to.bias, dtype)  # a cast waited, a wider adapter's
    weight = to.weight if to.weight.dtype == dtype else compiled.cast(to.weight, dtype)
    return F.linear(value, weight, to.bias)
