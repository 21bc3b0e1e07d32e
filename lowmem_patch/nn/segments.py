"""Inputs of blocks that are not saved, and computed again from the input of the first block of a segment.

In a segment of n blocks only the first saves its input. When backward comes to the last block, the others
before it run again from there, and leave their outputs for their own backward (O(sqrt n) inputs, where there
are sqrt n segments), or, in halves, O(log n) of them, from which the others are computed once more.

A block knows by whom its input was made from the very tensor: what has been changed, wrapped or cast between
two blocks is another tensor, and is saved. So no model is run in another way than it is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import get_device_states, set_device_states

_saved_tensors_hooks: Any = torch.autograd.graph.saved_tensors_hooks  # typed for tensors alone
_MADE_BY = "_lowmem_patch_made_by"
_CHANGED = (
    "lowmem_patch: the input of a checkpointed block was written in place before backward, which cannot "
    "compute it again: patch the model without fit, or with a larger budget"
)


class Call:
    """One run of a block that can be repeated for its output.

    Args:
        run: of the tensors among the block's arguments.
        tensors: those.
        place: of the input among them.
        waits: what gives the input again (``value()``), or None: it is held here.
        halves: as in ``Recompute``.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        tensors: tuple[Tensor, ...],
        place: int,
        waits: Any,
        *,
        halves: bool,
    ) -> None:
        self.run, self.place, self.waits, self.halves = run, place, waits, halves
        given = tensors[place]
        self.tensors = [tensor.detach() for tensor in tensors]
        self.versions = [tensor._version for tensor in tensors]
        if waits is not None:
            self.tensors[place] = given.new_empty(0)
        self.state = _State(given)
        self.version = -1  # of the output, when it was made
        self.known: Tensor | None = None  # the output, where it was computed for another one

    def value(self) -> Tensor:
        """The output, computed again."""
        if self.known is not None:
            value, self.known = self.known, None
            return value
        path: list[Call] = [self]
        source = self.waits
        while isinstance(source, Call) and source.known is None:
            path.append(source)
            source = source.waits
        x: Tensor | None = None
        if source is not None:
            x = source.known if isinstance(source, Call) else source.value()
        path.reverse()
        for place, call in enumerate(path):
            x = call._output(x)
            behind = len(path) - 1 - place
            if behind and not (self.halves and behind & (behind - 1)):
                call.known = x
        assert x is not None
        return x

    def _output(self, x: Tensor | None) -> Tensor:
        tensors = list(self.tensors)
        for place, version in enumerate(self.versions):
            if place == self.place and x is not None:
                tensors[place] = x
            elif tensors[place]._version != version:
                raise RuntimeError(_CHANGED)
        # as the first run, whose ops were recorded: without gradients they might be others
        nothing: Any = _saved_tensors_hooks(lambda tensor: None, lambda _: None)
        with self.state.restored(), torch.enable_grad(), nothing:
            made: Any = first_tensor(self.run(*tensors))  # there is one, as `remember` found
            return made.detach()  # type: ignore[no-any-return]  # of `made`


class _State:
    """What a run depends on beside its arguments: random numbers and autocast."""

    def __init__(self, x: Tensor) -> None:
        device = x.device.type
        self.kind = "cuda" if device == "cpu" else device
        self.numbers = None
        if not isinstance(x, FakeTensor):
            self.numbers = (torch.get_rng_state(), *get_device_states(x))
        self.casts = [
            torch.autocast(
                kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys(("cpu", device))
            if torch.amp.autocast_mode.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            if self.numbers is not None:
                cpu, devices, states = self.numbers
                contexts.enter_context(torch.random.fork_rng(devices, device_type=self.kind))
                torch.set_rng_state(cpu)
                set_device_states(devices, states, device_type=self.kind)
            for cast in self.casts:
                contexts.enter_context(cast)
            yield


def first_tensor(output: Any) -> Tensor | None:
    """What a block passes on to the next: its output, or the first tensor in it; None, where none stands
    first."""
    while not isinstance(output, Tensor):
        if not hasattr(output, "values") and not isinstance(output, (tuple, list)):
            return None  # text, or an iterator that the next block reads
        output = next(iter(output.values() if hasattr(output, "values") else output), None)
    return output


def remember(call: Call, output: Any) -> None:
    """Say on a block's output by what it was made."""
    tensor = first_tensor(output)
    if tensor is None:  # nothing can be computed again from it
        return
    call.version = tensor._version
    tensor.__dict__[_MADE_BY] = call


def made_by(tensor: Tensor) -> Call | None:
    """The call that made this very tensor, unless somebody wrote into it since."""
    call: Call | None = tensor.__dict__.get(_MADE_BY)
    return call if call is not None and call.version == tensor._version else None
