"""Which ops of a traced forward autograd holds on to: those through which an output has a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.shadow import tensors_in
from lowmem_patch.tracing.trace import Op, Trace


def live_ops(trace: Trace) -> list[Op]:
    """Ops through which an output of the model has a gradient: autograd lets go of what others saved."""
    # storages, so that a write into a view reaches what it is a view of
    reached: set[int] = set()
    for op in trace.ops:
        reached.update(_storages(t for t in op.outputs if id(t) in trace.outputs))
    found = []
    for op in reversed(trace.ops):
        made = _made(op)
        differentiable = any(tensor.requires_grad for tensor in made)
        if differentiable and not reached.isdisjoint(_storages(made)):
            reached.update(_storages(op.reads))
            found.append(op)
    return found[::-1]


def _made(op: Op) -> tuple[Tensor, ...]:
    """What an op returns or, with nothing to return, writes into."""
    return tuple(tensors_in(op.args[:1])) if op.writes and not op.outputs else op.outputs


def let_go(trace: Trace, live: Sequence[Op]) -> set[int]:
    """Keys of storages that only ops outside of ``live`` read or make.

    The trace holds the graphs of such ops, and autograd does not: GLM-Image compares a picture's features
    with codes, and takes the number of the nearest one.
    """
    held = {id(op) for op in live}
    keys: dict[bool, set[int]] = {True: set(), False: set()}
    for op in trace.ops:
        keys[id(op) in held].update(_storages((*op.reads, *op.outputs)))
    return keys[False] - keys[True]


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Keys of their storages; tensors inside of torch.vmap (masks of attention) have none."""
    return (
        storage_key(t) for t in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )
