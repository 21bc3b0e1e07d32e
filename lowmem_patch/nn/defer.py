"""How a tensor is deferred: its node, by which its gradient goes to what it is computed from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import (
    backward_number,
    first_order,
    is_checkpoint_packing,
    packer,
    saved_tensors,
    without_torch_function,
)
from lowmem_patch.nn.deferred import Unstored, origin_of
from lowmem_patch.nn.op import Op

_wrapper: Any = Tensor._make_wrapper_subclass


class _Defer(torch.autograd.Function):
    """op, sources -> a tensor without storage; ``into``: that one, which gives its place in the graph up."""

    @staticmethod
    def forward(ctx: Any, op: Op, into: Unstored | None, *sources: Tensor) -> Unstored:
        ctx.op = op.in_checkpoint() if is_checkpoint_packing() else op
        ctx.set_materialize_grads(False)
        if op.saves:
            ctx.save_for_backward(*sources)
        elif op.holds:
            ctx.held, ctx.versions = sources, [source._version for source in sources]
        if into is None:
            h: Unstored = _wrapper(
                Unstored,
                op.shape(sources),
                strides=op.strides(sources),
                dtype=op.dtype(sources),
                device=sources[0].device,
            )
        else:
            h = into
            ctx.mark_dirty(h)
        ctx.made = (weakref.ref(h),) if op.outlives else ()
        return h

    @staticmethod
    @first_order("deferred")
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad[2:]
        sources = saved_tensors(ctx, "what a value is computed of again")
        if ctx.op.holds:
            sources = ctx.held
            if [source._version for source in sources] != ctx.versions:
                raise RuntimeError(ctx.op.written_source)
        found = ctx.op.gradients(dy, *sources)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            _keep_values((*ctx.made, *ctx.op.past))
        return None, None, *(g if need else None for g, need in zip(found, needs, strict=True))


def _keep_values(made: Iterable[weakref.ref[Any]]) -> None:
    """Hold the values of tensors that outlive their readers, as what a hook has kept does: an optimizer may
    write into the parameters of which they would be computed, and a fused one leaves no trace there."""
    with without_torch_function():
        for h in (found for one in made if (found := one()) is not None):
            if any(map(_is_trained, h.sources)) and not h.is_stale():
                h.read()
                h._exposed = True  # readers take them


def _is_trained(source: Tensor) -> bool:
    """Whether this is a tensor that an optimizer may write into, or a view of one."""
    whole = source if source._base is None else source._base
    return whole.is_leaf and whole.requires_grad


# Function.apply without its search for torch.func's wrappers, where nothing is deferred
_defer: Any = super(torch.autograd.Function, _Defer).apply


def defer(op: Op, sources: tuple[Tensor, ...], into: Unstored | None = None) -> Unstored:
    """A tensor on the device of ``sources[0]`` whose values are computed when they are read.

    Args:
        into: of that shape and dtype, without values: whoever has it reads what the op computes, as after a
            write in place. Its gradient goes to the sources, and no longer to what it was computed from.
    """
    h: Unstored = _defer(op, into, *map(origin_of, sources))
    if into is not None:
        h._value, h._times_read, h._first_version = None, 0, h._version
    h.op, h.sources, h._adapts, h._packer = op, sources, False, packer()
    h._versions = [source._version for source in sources]
    if op.outlives and backward_number() != -1:
        # torch's checkpoint runs a block again for what is saved: no gradient comes to what that run made
        made = (weakref.ref(h),)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _keep_values(made))
    return h
