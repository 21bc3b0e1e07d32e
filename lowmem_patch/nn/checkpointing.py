"""A block whose forward saves its input alone, and is run again in backward (activation checkpointing).

`checkpointed` is the forward of such a block: torch's own non-reentrant checkpoint around the forward that
the block had. Its `Recompute` says what is saved beside the input (`attention`), and where the input waits:

- ``"device"``: where it is;
- ``"host"``: in host memory (`lowmem_patch.nn.host_memory`);
- ``"segment"``: nowhere. It is the output of the block before, which is computed again from the input of the
  segment's first block (`lowmem_patch.nn.segments`).

Whoever checkpoints the block otherwise (transformers' and timm's switches, a user's own call) is noticed when
the block runs, and then this forward does nothing of its own: a block is never run twice for one backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowmem_patch.functional import backward_number, in_compiler, is_checkpoint_packing, unwritten
from lowmem_patch.nn.block_state import BlockState, is_gathered
from lowmem_patch.nn.caches import ForwardCaches, without_empty_caches
from lowmem_patch.nn.context import trains_here
from lowmem_patch.nn.deferred import detached_of, value_of
from lowmem_patch.nn.host_memory import HostMemory
from lowmem_patch.nn.modes import AroundForward
from lowmem_patch.nn.own import Own, drop_forward, give_forward, given_forward, inner_forward
from lowmem_patch.nn.segments import Call, made_by, remember
from lowmem_patch.tracing.op_roles import Role, function_name, role_of

# the names of transformers, diffusers and timm for a switch of their own checkpointing
SWITCHES = ("gradient_checkpointing", "grad_checkpointing")


class Level:
    """What a block does under a budget: the first setting of the forward that the budget gives it."""


@dataclasses.dataclass(frozen=True)
class Recompute(Level):
    """How a block is run again in backward.

    Attributes:
        attention: what fused attention gives is saved, and attention is not run again.
        input: where the block's input waits: ``"device"``, ``"host"`` or ``"segment"``.
        continues: the next block's input is not saved, and computed from this block's.
        halves: a segment runs again in halves: its inputs cost O(log n) bytes and O(n log n) time,
            not n and n.
        buffers: names of the block's buffers that its forward writes, which a second run must not.
        host: holds the inputs that wait in host memory.
        caches: of keys and values, of the running forward; one for all blocks.
        repeats: the forward calls the block several times.
    """

    attention: bool = False
    input: str = "device"
    continues: bool = False
    halves: bool = False
    buffers: tuple[str, ...] = ()
    host: HostMemory | None = None
    caches: ForwardCaches = dataclasses.field(default_factory=ForwardCaches)
    repeats: bool = False


def is_checkpointed(block: nn.Module) -> bool:
    """Whether a budget gave the block a forward: this one, or one of `lowmem_patch.nn.offloading`."""
    forward = given_forward(block)
    return isinstance(forward, Own) and any(isinstance(s, Level) for s in forward.args[1:2])


def keep_block(block: nn.Module) -> None:
    """Take what a budget gave off again, and leave the forward that the block had."""
    while is_checkpointed(block):
        inner: Own | None = given_forward(block).args[2]
        if inner is None:
            drop_forward(block)
        else:
            give_forward(block, inner.func, *inner.args[1:])


def checkpointed(
    block: nn.Module, how: Recompute, given: Own | None, /, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a block that is run again in backward."""
    forward = inner_forward(block, given)
    if saves_nothing(block):
        return forward(*args, **kwargs)
    compiling = in_compiler()
    # somebody else checkpoints what is running, or runs it again in backward
    if not compiling and (backward_number() != -1 or is_checkpoint_packing()):
        return forward(*args, **kwargs)
    taken = without_empty_caches(block, how.caches, args, kwargs, how.repeats)
    if taken is None:
        return forward(*args, **kwargs)
    if compiling:
        args, kwargs = taken
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
    return _Run(block, how, forward, *taken).checkpointed()


def saves_nothing(block: nn.Module) -> bool:
    """Whether a forward that runs now is for no backward, or the library's own checkpointing runs it."""
    return not trains_here() or is_switched_on(block)


def is_switched_on(block: nn.Module) -> bool:
    """Whether transformers' or timm's own checkpointing is on in the block."""
    return any(module.__dict__.get(name) for module in block.modules() for name in SWITCHES)


class _Place(int):
    """The place at which a tensor stood among the arguments."""


def _taken_out(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with places for its tensors, which are added to ``tensors``; a list, a dict or another
    object, into which a block may write, stays itself."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) is tuple:
        return tuple(_taken_out(item, tensors) for item in value)
    return value


def input_among(given: list[Tensor]) -> Tensor | None:
    """What runs from block to block: the first tensor that has a gradient, or the first of numbers."""
    floating = [tensor for tensor in given if tensor.is_floating_point()]
    trained = (tensor for tensor in floating if tensor.requires_grad)
    return next(trained, floating[0] if floating else None)


def given_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given: list[Tensor] = []
    _taken_out((*args, *kwargs.values()), given)
    return given


def _put_back(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    if type(value) is _Place:
        return tensors[value]
    if type(value) is tuple:
        return tuple(_put_back(item, tensors) for item in value)
    return value


class _Run:
    def __init__(
        self,
        block: nn.Module,
        how: Recompute,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.block, self.how, self.forward = block, how, forward
        self.state = BlockState(block, how.buffers)
        given: list[Tensor] = []
        self.args = _taken_out(args, given)
        self.kwargs = {name: _taken_out(value, given) for name, value in kwargs.items()}
        self.input: Tensor | None = input_among(given)
        # a deferred tensor would be a plain one in the second run, in which other readers would read it
        self.tensors = tuple(map(value_of, given))
        # without their history, by which a deferred tensor would keep its sources alive
        self.saved = tuple(map(detached_of, given))
        self.trains = [tensor.requires_grad for tensor in given]
        self.place = next((i for i, t in enumerate(given) if t is self.input), -1)
        self.waits = self._waiting_input()
        self.runs = 0

    def _waiting_input(self) -> Any:
        """What gives the input again, where it is not saved as it is."""
        if self.input is None or self.how.input == "device":
            return None
        if self.how.input == "host":
            host = self.how.host
            return None if host is None else host.keep(self.saved[self.place], self.input)
        return None if is_gathered(self.block) else made_by(self.input)

    def checkpointed(self) -> Any:
        fake = any(isinstance(tensor, FakeTensor) for tensor in self.saved)
        contexts: dict[str, Any] = {"context_fn": _around_attention} if self.how.attention else {}
        saved = self.saved
        call = None
        if self.how.continues and self.input is not None:
            call = Call(self._body, saved, self.place, self.waits, halves=self.how.halves)
        packing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.waits is not None:
            packing = _Packing(saved[self.place], self.waits)
        self.saved, self.input = (), None
        with packing:
            output = checkpoint(
                self._body, *saved, use_reentrant=False, preserve_rng_state=not fake, **contexts
            )
        if call is not None:
            remember(call, output)
        return output

    def _body(self, *tensors: Tensor) -> Any:
        if not self.runs:
            tensors, self.tensors = self.tensors, ()
        else:
            pairs = zip(tensors, self.trains, strict=True)
            tensors = tuple(tensor.detach().requires_grad_(trains) for tensor, trains in pairs)
        self.runs += 1
        # a tensor of a subclass whose backward() runs leaves torch functions off, which deferred tensors need
        again: Any = self.state.restored() if self.runs > 1 else contextlib.nullcontext()
        with again, torch._C._EnableTorchFunction():
            named = {name: _put_back(value, tensors) for name, value in self.kwargs.items()}
            return self.forward(*_put_back(self.args, tensors), **named)


class _Packing(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what waits for a block's input is saved in its place."""

    def __init__(self, given: Tensor, waits: Any) -> None:
        self.held = held = [given, waits]

        def pack(tensor: Tensor) -> Any:
            return held[1] if _is_same(tensor, held[0]) else (tensor, tensor._version)

        super().__init__(pack, _unpack)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.held.clear()  # autograd holds the hook as long as what it packed


def _unpack(packed: Any) -> Tensor:
    if not isinstance(packed, tuple):
        waiting: Tensor = packed.value()
        return waiting
    tensor, version = packed
    return unwritten(tensor, version, "a block that runs again was given; write into a copy of it")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride(), one.storage_offset())
        == (other.shape, other.stride(), other.storage_offset())
    )


class _AttentionOnce(AroundForward):
    """Runs fused attention under modes of selective checkpointing: it is saved in the first run of a block,
    and found in the second. Each call has modes of its own, since torch 2.15 counts the calls from the
    entry of a mode on. Under such a mode all ops would run as torch.compile's do, so nothing else does."""

    def __init__(self, seconds: list[Any], saves: bool) -> None:
        super().__init__()
        self.seconds = seconds  # modes of the second run, in the order of the calls
        self.saves = saves
        self.calls = 0

    def __enter__(self) -> Any:
        self.calls = 0
        return super().__enter__()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not role_of(function_name(func)).has(Role.FUSED_ATTENTION):
            return func(*args, **kwargs)
        if self.saves:
            make: Any = create_selective_checkpoint_contexts  # has no types
            mode, second = make(_saves_attention)
            self.seconds.append(second)
        else:
            mode = self.seconds[self.calls]
            self.calls += 1
        with mode:
            return func(*args, **kwargs)


def _saves_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return "attention" in op.name()


def _around_attention() -> tuple[Any, Any]:
    """Contexts of the first and the second run."""
    seconds: list[Any] = []
    return _AttentionOnce(seconds, saves=True), _AttentionOnce(seconds, saves=False)
