"""What a deferred tensor is computed by: the base of the ops, and what their readers ask them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowmem_patch.functional import LowRank, recast_linear

if TYPE_CHECKING:
    from lowmem_patch.nn.deferred import Deferred


# a torch function, and the arguments of a call
Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Named = dict[str, Any]


class Projection(NamedTuple):
    """What a value is multiplied with: a Linear's weight and bias, and the adapter beside it.

    Attributes:
        weight: ``[O, F]``; beside an adapter also a `PackedWeight`.
        shared: Linears with adapters besides this one read the same value.
        stored: in a compiled graph, what a weight's gradient needs is saved in 8 bits.
    """

    weight: Any  # a Tensor or a PackedWeight
    bias: Tensor | None
    adapter: LowRank | None = None
    shared: bool = False
    stored: bool = False


class Op:
    """How a deferred tensor is computed, and how its readers save less. Holds no tensor of autograd.

    Attributes:
        may_be_bypassed: readers send their gradient to the sources, past the tensor, so that a hook on the
            tensor would miss it.
        saves: the op's own gradient needs the values of the sources, which its readers save as well.
        written_source: the error where a source was written before the values were computed.
        written_view: the error where it was written, and another that shares its memory would not see it.
        elementwise: a view of the value is computed from views of the sources.
        holds: it needs them, and no reader saves them: they are held while the deferred tensor lives.
        outlives: it may be read after the backward, when an optimizer has written into a source.
        reads: how many operators read the values before they are let go, in forward as in backward; 0: they
            stay as long as the tensor. It is a guess: one reader more computes them again.
        past: weak references to deferred tensors of the same sources whose gradient goes past them to this.
    """

    written_source = (
        "lowmem_patch: the input of a deferred activation or norm was written in place before its output was "
        "read: call patch_model with example_inputs that take this path of the forward, or leave this module "
        "alone"
    )
    written_view = (
        "lowmem_patch: the output of a deferred activation or norm was written in place while others that "
        "share its memory (a view, a slice) are held, and would not see it: write into a clone, or leave "
        "this module alone (activations: keep, norms: keep)"
    )
    may_be_bypassed = True
    saves = True
    holds = False
    elementwise = False
    outlives = False
    reads = 0
    past: tuple[weakref.ref[Any], ...] = ()

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        """Of the value."""
        return sources[0].dtype

    def shape(self, sources: tuple[Tensor, ...]) -> torch.Size:
        """Of the value."""
        return sources[0].shape

    def strides(self, sources: tuple[Tensor, ...]) -> tuple[int, ...] | None:
        """Of the value; None where it is contiguous."""
        return strides_like(sources[0]) if self.shape(sources) == sources[0].shape else None

    def compute(self, *sources: Tensor) -> Tensor:
        """The value, from plain tensors."""
        raise NotImplementedError

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the sources that have a gradient."""
        raise NotImplementedError

    def in_backward(self, h: Any) -> Tensor | None:
        """The values for the backward of who saved ``h``, where they are computed otherwise than before."""
        return None

    def in_checkpoint(self) -> Op:
        """The op of a block that torch's checkpoint runs again: the gradient has the sources for itself."""
        return self

    def in_eight_bits(self) -> Op:
        """The op whose readers save its sources in 8 bits, where it knows how."""
        return self

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        """The projection of ``h`` computed in ``dtype``, which saves as little as possible."""
        return recast_linear(h.plain(), to.weight, to.bias, dtype, to.adapter)

    def rearranged(self, h: Deferred, func: Function, args: Arguments, kwargs: Named) -> Any:
        """What a function that may only move rows returns, where the sources have other rows than ``h``."""
        return None

    def is_outdated(self) -> bool:
        """Whether somebody wrote into a source without a trace."""
        return False

    def note_reader(self, name: str) -> None:
        """The torch function of this name needs the values."""

    def was_computed(self, sources: tuple[Tensor, ...]) -> None:
        """The values have been computed from these."""

    def was_read(self, h: Any) -> None:
        """An operator has read the values of ``h``, an `Unstored`."""
        if self.reads:
            h._times_read += 1
            if h._times_read % self.reads == 0:
                h.let_go()

    def was_used(self, h: Any) -> None:
        """A function that is no known reader has read ``h``."""

    def recipe(self, h: Deferred) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None:
        """A function that gives the value again, and the tensors that autograd saves for it; or None."""
        return None

    def written_unseen(self, h: Deferred) -> None:
        """Somebody may be about to write into ``h`` without a trace (``.data``)."""

    def _unknown(self, h: Deferred, *given: Any, **named: Any) -> Any:
        return NotImplemented

    # what further known readers ask: each gives what a function makes of h, or NotImplemented
    moved = _unknown  # (h, move): behind a row move
    gathered = _unknown  # (h, index): h[index], the rows of these numbers
    cast = _unknown  # (h, dtype); NotImplemented for a cast that waits by itself
    grouped = _unknown  # (h, func, weight, offsets): times an `ExpertWeight`, by grouped_mm or bmm
    dropped = _unknown  # (h, p)
    times = _unknown  # (h, other)
    squared = _unknown  # (h)
    plus = _unknown  # (h, other)
    added = _unknown  # (h, other): h.add_(other)
    zeroed = _unknown  # (h, mask, in_place): h.masked_fill(mask, 0), of a mask [..., 1] of rows
    matmul = _unknown  # (h, right)
    activated = _unknown  # (h, kind, reads, in_place): act(h); in_place: who has h reads it there


_NO_GRADIENT = (
    "lowmem_patch: torch.autograd.grad asks for the gradient of a deferred tensor (logits, an activation) "
    "after a loss, a Linear or a view has read it, and their gradients go past it: call retain_grad() "
    "before, or leave this module alone (head: keep, activations: keep)"
)


def waits_for_gradient(h: Any) -> bool:
    """Whether somebody would miss a gradient that goes past a deferred tensor."""
    return bool(h._backward_hooks) or h.retains_grad or h._node_given


def refuse_bypassed(inputs: Any) -> None:
    """Raise where a gradient is asked for that went past a deferred tensor."""
    for item in tree_leaves(inputs):
        if getattr(item, "was_bypassed", False) and item.op.may_be_bypassed:
            raise RuntimeError(_NO_GRADIENT)


def strides_like(like: Tensor) -> tuple[int, ...] | None:
    """The strides of an elementwise op's value; None where it is contiguous."""
    if like.is_contiguous():
        return None
    if is_dense(like):
        return like.stride()
    made = torch.empty_like(like, device="meta")  # which counts as memory where a step is predicted
    return None if made.is_contiguous() else made.stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a memory of their number, in any order of the dimensions."""
    filled = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != filled:
            return False
        filled *= length
    return True
