"""The parameters and buffers that a block has when it runs again in backward: those of its first run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowmem_patch.functional import is_sharded
from lowmem_patch.nn.context import is_fsdp_unit

# where a tensor stands, its name there, and the tensor
Held = tuple[dict[str, Any], str, Tensor]


def is_gathered(block: nn.Module) -> bool:
    """Whether the weights are there while this very block runs (FSDP, ZeRO-3), and no other."""
    marks = ("ds_id", "_fsdp_flattened")
    return is_fsdp_unit(block) or any(
        is_sharded(parameter) or any(hasattr(parameter, mark) for mark in marks)
        for parameter in block.parameters()
    )


def held_by(block: nn.Module) -> Iterator[Held]:
    """The parameters and buffers of a block, and where each of them stands."""
    for module in block.modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                if tensor is not None:
                    yield place, name, tensor


@contextlib.contextmanager
def with_held(block: nn.Module, held: tuple[Held, ...]) -> Iterator[None]:
    """Run a block with the tensors of its first run: torch.func.functional_call takes its own away before
    the backward begins."""
    other = [one for one in held if one[0].get(one[1], one[2]) is not one[2]]
    if other and is_gathered(block):
        other = []
    before = [place[name] for place, name, _ in other]
    try:
        for place, name, tensor in other:
            place[name] = tensor
        yield
    finally:
        for (place, name, _), tensor in zip(other, before, strict=True):
            place[name] = tensor


@contextlib.contextmanager
def as_they_were(block: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Put back what a second run writes into buffers: the first one has written it."""
    buffers = [block.get_buffer(name) for name in names]
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # past autograd, which would take the write for a change
