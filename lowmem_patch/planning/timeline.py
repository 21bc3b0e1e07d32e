"""The bytes of one training step on fake tensors, run by run of the blocks.

Each storage is counted from its allocation to its release, and belongs to the run of a block in which it was
allocated. The sums are taken for each part of the step: a block's forward, what lies behind it up to the next
(behind the last one, head and loss), and a block's backward, with whatever is computed again in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.errors import TraceError
from lowmem_patch.memory.step import as_on_data, run_step
from lowmem_patch.nn.deferred import Unstored
from lowmem_patch.tracing.gpu_dropout import GpuDropouts
from lowmem_patch.tracing.isolation import in_training_mode, running_fake
from lowmem_patch.tracing.live_storages import LiveStorages
from lowmem_patch.tracing.observers import observed_calls
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.shadow import Shadow, tensors_in

_OUTSIDE = -1
Part = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class RunBytes:
    """Bytes of one run of a block.

    Attributes:
        own: allocated in its forward and alive when the forward of the model ends, but for its outputs.
        output: of its outputs, as far as it made them.
        output_lives: whether they are alive then.
        forward, behind, backward: the largest sums of all storages alive in these parts of the step.
    """

    own: int
    output: int
    output_lives: bool
    forward: int
    behind: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Bytes of one step; parameters, buffers and the optimizer's state are not counted, nor gradients of an
    earlier batch; those that the step makes are.

    Attributes:
        runs: of the blocks, in the order of the forward.
        before: the largest sum before the first run.
        outside: alive when the forward ends, and allocated in no run.
        held: alive when the forward ends.
        end: alive after the backward: the gradients.
        events: on a GPU, what its allocator is asked for (`LiveStorages`).
        begins: by part of the step, the number of the event with which it begins.
    """

    runs: tuple[RunBytes, ...]
    before: int
    outside: int
    held: int
    end: int
    events: tuple[tuple[int, int], ...] = ()
    begins: tuple[tuple[int, Part], ...] = ()

    def part_of(self, event: int) -> Part:
        """The part of the step to which an event belongs."""
        return [part for begin, part in self.begins if begin <= event][-1]

    @property
    def peak(self) -> tuple[int, str, int]:
        """The largest sum, in which part, of which run."""
        parts = [(self.before, "before", 0)]
        for number, run in enumerate(self.runs):
            parts += [
                (run.forward, "forward", number),
                (run.behind, "behind", number),
                (run.backward, "backward", number),
            ]
        return max(parts)


class _LiveRuns(LiveStorages):
    """The owner of a storage is the run in which it was allocated."""

    def __init__(
        self, ignored: Iterable[Tensor], packed: Iterable[Tensor], *, on_gpu: bool
    ) -> None:
        super().__init__(ignored, packed, on_gpu=on_gpu)
        self.part: Part = ("before", 0)
        self.most: dict[Part, int] = {}
        self.begins = [(0, self.part)] if on_gpu else []

    def grown(self, now: int) -> None:
        self.most[self.part] = max(self.most.get(self.part, 0), now)

    def begin(self, part: Part, run: int = _OUTSIDE) -> None:
        self.settle()
        self.part, self.owner = part, run
        if self.on_gpu:
            self.begins.append((len(self.events), part))
        self.grown(self.now)


class _Marks:
    """Follows the runs of the blocks through one step."""

    def __init__(
        self, live: _LiveRuns, sites: frozenset[str], settle: Callable[[], None] | None
    ) -> None:
        self.live, self.sites, self.settle = live, sites, settle
        self.outputs: list[dict[int, int]] = []  # bytes by key, of what the run made
        self.alive: dict[int, tuple[int, int, Any]] | None = None  # when the forward ended

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self.sites and self.alive is None:
            number = len(self.outputs)
            self.outputs.append({})
            self.live.begin(("forward", number), number)

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        if self.alive is not None:
            return
        if name == "":
            if self.settle is not None:
                self.settle()
            self.alive = dict(self.live.live)
        if name not in self.sites:
            return
        number = len(self.outputs) - 1
        tensors = [t for t in tensors_in(output) if not isinstance(t, Unstored)]
        for key in map(storage_key, tensors):
            size, run, _ = self.live.live.get(key, (0, _OUTSIDE, None))
            if run == number:
                self.outputs[number][key] = size
        nodes = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
        if nodes:  # no hook on the tensor, for which a deferred one would be computed
            nodes[0].register_prehook(lambda _: self.live.begin(("backward", number)))
        self.live.begin(("behind", number))

    def timeline(self) -> Timeline:
        self.live.settle()
        alive, most = self.alive or {}, self.live.most
        runs = []
        for number, made in enumerate(self.outputs):
            own = {key: size for key, (size, run, _) in alive.items() if run == number}
            runs.append(
                RunBytes(
                    sum(size for key, size in own.items() if key not in made),
                    sum(made.values()),
                    any(key in own for key in made),
                    *(most.get((part, number), 0) for part in ("forward", "behind", "backward")),
                )
            )
        outside = sum(size for size, run, _ in alive.values() if run == _OUTSIDE)
        held = sum(size for size, _, _ in alive.values())
        return Timeline(
            tuple(runs), most.get(("before", 0), 0), outside, held, self.live.now,
            tuple(self.live.events), tuple(self.live.begins),
        )  # fmt: skip


@contextlib.contextmanager
def _gradients(model: nn.Module, accumulates: bool) -> Iterator[None]:
    """Gradients are none before the step, or those of an earlier batch, and are put back after it."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in held:
        earlier = accumulates and parameter.requires_grad
        parameter.grad = torch.empty_like(parameter) if earlier else None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def run_timeline(
    shadow: Shadow,
    sites: Sequence[str],
    settle: Callable[[], None] | None = None,
    *,
    accumulates: bool = False,
) -> Timeline:
    """One step of a shadow in training mode; gradients are made in it, as after ``zero_grad()``.

    Args:
        sites: paths of the blocks.
        settle: called when the forward ends, before it is looked what is alive.
        accumulates: it adds to the gradients of an earlier batch, which are not counted, as parameters.

    Raises:
        TraceError: the forward or the backward fails.
    """
    model, inputs = shadow.model, shadow.inputs
    given = tensors_in((inputs.args, inputs.kwargs))
    torch.clear_autocast_cache()
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(in_training_mode(model))
        contexts.enter_context(torch.enable_grad())
        if shadow.mode is not None:
            contexts.enter_context(running_fake(shadow.mode))
        contexts.enter_context(_gradients(model, accumulates))
        if shadow.elsewhere:
            contexts.enter_context(GpuDropouts())
        earlier = [p.grad for p in model.parameters() if p.grad is not None]
        states = (*model.parameters(), *model.buffers(), *shadow.beside, *earlier)
        live = _LiveRuns(states, shadow.packed, on_gpu=shadow.on_gpu)
        marks = _Marks(live, frozenset(sites), settle)
        contexts.enter_context(observed_calls(model, marks.enter, marks.leave))
        contexts.enter_context(live)
        for tensor in given:
            live.add(tensor)
        try:
            run_step(model, as_on_data(model, inputs))
        except Exception as error:  # of a foreign forward
            raise TraceError(
                f"a training step of {type(model).__name__} could not be run to plan how it fits: "
                f"{type(error).__name__}: {error}"
            ) from error
        timeline = marks.timeline()
    torch.clear_autocast_cache()
    return timeline
