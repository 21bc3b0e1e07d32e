"""One training step on fake tensors, with every storage counted from its allocation to its release.

The sum is the eager allocation of a real step, without data. Of what kernels take for themselves, that of a
table's gradient is counted (`lowmem_patch.tracing.live_storages`). The CUDA context (about 0.5 GiB) is not,
nor what the allocator rounds up, nor its fragmentation.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.errors import TraceError
from lowmem_patch.nn.deferred import Unstored
from lowmem_patch.tracing.base_model import base_model, is_leaf, output_head
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import in_training_mode
from lowmem_patch.tracing.live_storages import LiveStorages
from lowmem_patch.tracing.observers import ended_checkpoints, observed_calls
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.shadow import Shadow, as_on_data, node_of, output_tensors, tensors_in

FORWARD, LOSS, AFTER_LOSS = "forward", "loss", "after the loss"
BACKWARD, AFTER_BACKWARD, OPTIMIZER = "backward", "after the backward", "optimizer step"
MOMENTS = (FORWARD, LOSS, AFTER_LOSS, BACKWARD, AFTER_BACKWARD, OPTIMIZER)

# A moment, and a place among the runs of blocks, which are counted from 0: 0 in front of them, 2 n + 1 in a
# run, 2 n + 2 behind it. A backward is at the run that it has reached last.
Part = tuple[str, int]


class LiveBytes(LiveStorages):
    """The maximum is kept for each part of a step. The owner of a storage is the place at which it was
    allocated.

    Attributes:
        parts: the largest sum of all storages alive at one time, by part; without model states, but for the
            gradients that the step makes.
        begins: on a GPU, by part of the step, the number of the event with which it begins.
        outputs: of each run, bytes by key, of what it made.
        alive: what was alive when the forward ended, as ``live``.
        kept: bytes that were alive when the loss was there, by owner: the model's outputs were released.
    """

    def __init__(
        self,
        ignored: Iterable[Tensor],
        packed: Iterable[Tensor],
        sites: Iterable[str],
        settled: Callable[[], None] | None,
        *,
        on_gpu: bool,
    ) -> None:
        """
        Args:
            ignored, packed, on_gpu: as of `LiveStorages`.
            sites: paths of the blocks.
            settled: called when the forward ends, before it is looked what is alive.
        """
        super().__init__(ignored, packed, on_gpu=on_gpu)
        self.sites, self.settled = frozenset(sites), settled
        self.place = 0
        self.parts: dict[Part, int] = {}
        self.begins: list[tuple[int, Part]] = []
        self.outputs: list[dict[int, int]] = []
        self.alive: dict[int, tuple[int, int, Any]] | None = None
        self.kept: Counter[int] = Counter()
        self.begin(FORWARD, 0)

    def begin(self, moment: str, place: int | None = None) -> None:
        """The next allocations belong to this part; by default at the present place."""
        self.settle()
        self.moment, self.place = moment, self.place if place is None else place
        self.owner = self.place
        if self.on_gpu:
            self.begins.append((len(self.events), (moment, self.place)))
        self.grown(self.now)

    def mark(self, moment: str) -> None:
        """What is alive right now is all of this moment."""
        self.settle()
        self.parts[moment, 0] = self.now
        if moment == AFTER_LOSS:
            for size, place, _ in self.live.values():
                self.kept[place] += size

    def grown(self, now: int) -> None:
        part = self.moment, self.place
        self.parts[part] = max(now, self.parts.get(part, 0))

    # what `observed_calls` tells; a call after the forward is computed again

    def enter(self, name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if name in self.sites and self.alive is None:
            self.outputs.append({})
            self.begin(FORWARD, 2 * len(self.outputs) - 1)

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        if self.alive is not None:
            return
        if name in self.sites:
            self._leave_run(output)
        # behind the last block, or module that has parameters and no children, such as the head
        if name in self.sites or (is_leaf(module) and next(module.parameters(), None) is not None):
            self._not_the_loss()
            self.begin(LOSS)
        if name == "":
            if self.settled is not None:
                self.settled()
            self.alive = dict(self.live)

    def _not_the_loss(self) -> None:
        """What was taken for the loss since the last module returned belongs to the forward."""
        for place in [place for moment, place in self.parts if moment == LOSS]:
            found = self.parts.pop((LOSS, place))
            self.parts[FORWARD, place] = max(found, self.parts.get((FORWARD, place), 0))

    def _leave_run(self, output: Any) -> None:
        number, tensors = len(self.outputs) - 1, tensors_in(output)
        for key in (storage_key(t) for t in tensors if not isinstance(t, Unstored)):
            size, place, _ = self.live.get(key, (0, 0, None))
            if place == 2 * number + 1:
                self.outputs[number][key] = size
        nodes = [node for node in map(node_of, tensors) if node is not None]
        if nodes:  # no hook on the tensor, for which a deferred one would be computed
            nodes[0].register_prehook(lambda _: self.begin(BACKWARD, 2 * number + 1))
        self.begin(FORWARD, 2 * number + 2)


def with_labels(model: Any, inputs: ExampleInputs) -> ExampleInputs:
    """A language model gets labels of their own memory, if it has none yet, so that it makes its own loss."""
    tokens = inputs.kwargs.get("decoder_input_ids", inputs.kwargs.get("input_ids"))
    takes_labels = "labels" in inspect.signature(base_model(model).forward).parameters
    has_labels = inputs.kwargs.get("labels") is not None
    if has_labels or tokens is None or not takes_labels or output_head(model) is None:
        return inputs
    return ExampleInputs(inputs.args, {**inputs.kwargs, "labels": tokens.clone()})


def step_loss(output: Any) -> Tensor:
    """The model's own loss, or the mean square of the first tensor of its output that needs a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = output_tensors(output)
    first = next(tensor for tensor in tensors if tensor.requires_grad)
    return first.float().square().mean()


def run_step(model: nn.Module, inputs: ExampleInputs) -> None:
    """Forward, loss and backward. The outputs are released before the backward, as trainers do; a loop
    that holds them holds the logits for longer."""
    inputs = with_labels(model, inputs)
    loss = step_loss(model(*inputs.args, **inputs.kwargs))
    torch.autograd.backward(loss)


@contextlib.contextmanager
def _gradients(model: nn.Module, accumulates: bool) -> Iterator[list[Tensor]]:
    """Gradients are none before the step, or those of an earlier batch, and are put back after it."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in held:
        earlier = accumulates and parameter.requires_grad
        parameter.grad = torch.empty_like(parameter) if earlier else None
    try:
        yield [parameter.grad for parameter, _ in held if parameter.grad is not None]
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


@contextlib.contextmanager
def watched_step(
    shadow: Shadow,
    sites: Iterable[str] = (),
    *,
    accumulates: bool = False,
    settled: Callable[[], None] | None = None,
) -> Iterator[LiveBytes]:
    """What was alive in a step of a shadow in training mode, as long as the context is open. Gradients are
    made in it, as after ``zero_grad()``.

    Args:
        sites: paths of the blocks whose runs are told apart.
        accumulates: it adds to the gradients of an earlier batch, which are not counted, as parameters.
        settled: called when the forward ends, before it is looked what is alive.

    Raises:
        TraceError: the forward or the backward fails.
    """
    model = shadow.model
    # once more: checkpointing may have been switched on since the shadow was made
    inputs = as_on_data(model, with_labels(model, shadow.inputs))
    torch.clear_autocast_cache()
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(in_training_mode(model))
        contexts.enter_context(torch.enable_grad())
        contexts.enter_context(shadow.running())
        earlier = contexts.enter_context(_gradients(model, accumulates))
        held = [*model.parameters(), *model.buffers(), *shadow.beside, *earlier]
        live = LiveBytes(held, shadow.packed, sites, settled, on_gpu=shadow.on_gpu)
        contexts.enter_context(observed_calls(model, live.enter, live.leave))
        contexts.enter_context(live)
        contexts.enter_context(ended_checkpoints())
        for tensor in inputs.tensors:
            live.add(tensor)
        try:
            _run(model, inputs, live)
        except Exception as error:  # of a foreign forward
            raise TraceError(
                f"a training step of {type(model).__name__} could not be run on fake tensors: "
                f"{type(error).__name__}: {error}"
            ) from error
        yield live
    torch.clear_autocast_cache()


def _run(model: nn.Module, inputs: ExampleInputs, live: LiveBytes) -> None:
    loss = step_loss(model(*inputs.args, **inputs.kwargs))
    live.mark(AFTER_LOSS)
    live.begin(BACKWARD)
    # a function mode is off in a call that it sees, as that of a tensor's; blocks that run again need it
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
    live.mark(AFTER_BACKWARD)
