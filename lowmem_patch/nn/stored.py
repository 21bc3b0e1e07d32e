"""Tensors that hold their values and stand for an op: `Stored`, and in a compiled graph `Compiled`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, without its import
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import in_compiler, packer, see_undefined
from lowmem_patch.nn.deferred import Deferred, Stored, Unstored
from lowmem_patch.nn.op import Op


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
