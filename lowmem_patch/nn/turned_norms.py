"""Norms of queries and keys that save what a rotation made of their output, as attention does.

A norm saves its output y to recover z from it in backward. Behind a norm of queries stands the rotary
embedding, and behind that attention, which saves the turned queries q' = R y. So nobody else needs y:

    y = R^-1 q',     up to the rounding of q'

The norm saves a deferred tensor that holds y. The rotation, which finds it behind the history of what it
reads, lets it hold q', cos and sin in the place of y. Where no rotation comes, y stays. So it does where one
gamma of a pair that turns is much smaller than the other, whose rounding error it would be divided into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import (
    in_compiler,
    packer,
    turned_back,
    without_dispatch_modes,
    without_torch_function,
)
from lowmem_patch.nn.deferred import Unstored, register_own
from lowmem_patch.nn.gammas import is_capturing, tells_z_turned
from lowmem_patch.nn.op import Op, is_dense

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm

_WRITTEN = (
    "lowmem_patch: the output of a norm, or what a rotary embedding made of it, was written in place, and "
    "backward needs it as it was: write into a copy, or leave this norm alone (norms: keep)"
)
# how heads come to lie where a rotation reads them
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Unsqueeze", "Alias")
)
_MOST_VIEWS = 4
# cos^2 + sin^2 of both halves together, which must not vanish in float32; and its share of the determinant, 2
# where the halves are equal
_LEAST, _MOST = 1e-30, 8.0


class _Output(Op):
    """A norm's output, which is held until a rotation turned it."""

    written_source = _WRITTEN
    may_be_bypassed = False

    def __init__(self, norm: MSNorm) -> None:
        self.norm = norm


class _TurnedBack(Op):
    """A norm's output, computed of what a rotation made of it: the sources are that, cos and sin.

    Args:
        like: what the rotation read, a view of all of the output.
        output: of the norm.
    """

    written_source = _WRITTEN
    may_be_bypassed = False

    def __init__(self, like: Tensor, output: Tensor, heads_dim: int) -> None:
        self.settings = heads_dim, like.stride(), output.dtype
        self.size, self.stride = output.shape, output.stride()

    def compute(self, *sources: Tensor) -> Tensor:
        turned, cos, sin = sources
        return turned_back(turned, cos, sin, *self.settings).as_strided(self.size, self.stride)


class NormOutput(Unstored):
    """What stands for a norm's output where the norm saves it."""

    def read(self) -> Tensor:
        if self.was_written():
            raise RuntimeError(_WRITTEN)
        return super().read()

    def held_values(self) -> Tensor | None:
        """The output, or what was made of it: whoever counts what is saved asks for this."""
        return self._value if self._value is not None or not self.sources else self.sources[0]

    def was_written(self) -> bool:
        """Whether somebody wrote into the output that is held."""
        return self._value is not None and self._value._version != self._value_version


register_own(NormOutput)
_wrapper: Any = Tensor._make_wrapper_subclass


def saved_output(norm: MSNorm, y: Tensor) -> NormOutput:
    """What ``norm`` saves of its output, until a rotation turned that."""
    h: NormOutput = _wrapper(
        NormOutput, y.shape, strides=y.stride(), dtype=y.dtype, device=y.device
    )
    h.op, h.sources, h._adapts, h._packer = _Output(norm), (), False, packer()
    h._value, h._value_version = y.detach(), y._version
    return h


def note_turned(x: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> None:
    """Let the norm whose output is ``x`` save what a rotation made of it, ``turned``, in its place.

    Args:
        x: ``[B, H, S, D]`` or, with ``heads_dim`` 2, ``[B, S, H, D]``.
        turned: of the same shape.
        cos, sin: ``[B or 1, S, R]``.
    """
    if in_compiler():
        return
    h = _saved_behind(x)
    if h is None:
        return
    with without_torch_function():
        y = h._value
        if y is None or type(h.op) is not _Output or h.was_written() or not _is_all_of(x, y):
            return
        if turned.dtype.itemsize > y.dtype.itemsize or not _turns_back(
            h.op.norm, x.shape[-1], cos, sin
        ):
            return
        h.op, h.sources = _TurnedBack(x, y, heads_dim), (turned.detach(), cos, sin)
        h._versions, h._value = [source._version for source in h.sources], None


def _saved_behind(x: Tensor) -> NormOutput | None:
    """What the norm that made a tensor, behind views, saves of its output."""
    node: Any = x.grad_fn
    for _ in range(_MOST_VIEWS):
        reference = getattr(node, "saved_as", None)
        if reference is not None:
            found: NormOutput | None = reference()
            return found
        if node is None or node.name() not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


def _is_all_of(x: Tensor, y: Tensor) -> bool:
    """Whether a tensor has the elements of another, in the same memory."""
    same = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return same and x.numel() == y.numel() and is_dense(x)


def _turns_back(norm: MSNorm, width: int, cos: Tensor, sin: Tensor) -> bool:
    """Whether the rotation, which is the model's and looked at once, has an inverse, and that tells z."""
    if isinstance(cos, FakeTensor) or cos.is_meta:
        look = norm.gamma_checks.look
        found = None if look is None else look((width, cos.shape[-1]))
        return found is None or found.tell_z_turned()
    if is_capturing(cos.device):
        return False
    if norm.turns_back is None:
        norm.turns_back = _has_inverse(cos, sin)
    return norm.turns_back and tells_z_turned(norm, width, cos.shape[-1])


def _has_inverse(cos: Tensor, sin: Tensor) -> bool:
    """Whether no pair of columns is turned into what hardly tells it."""
    with torch.no_grad(), without_dispatch_modes():  # no op of a block that runs again
        dtype = torch.promote_types(cos.dtype, torch.float32)
        (c1, c2), (s1, s2) = cos.to(dtype).chunk(2, -1), sin.to(dtype).chunk(2, -1)
        size = c1.square() + c2.square() + s1.square() + s2.square()
        return bool(((size > _LEAST) & (size <= _MOST * (c1 * c2 + s1 * s2).abs())).all())
