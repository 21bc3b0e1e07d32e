"""One training step on fake tensors, with every storage counted from its allocation to its release.

The sum is the eager allocation of a real step, without data. Workspaces inside kernels, the CUDA
context (about 0.5 GiB) and the allocator's fragmentation are not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowmem_patch.errors import TraceError
from lowmem_patch.memory.base_model import base_model, output_head
from lowmem_patch.tracing.gpu_dropout import GpuDropouts
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.observers import DispatchObserver
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.shadow import Shadow
from lowmem_patch.tracing.trace import trace_forward

__all__ = ["StepBytes", "loss_or_output", "run_step", "step_bytes", "with_labels"]


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one step, its inputs included and the model states excluded.

    Attributes:
        saved: activations that autograd holds after the forward.
        weight_copies: low-precision copies of weights that it holds.
        peak: the largest sum of all storages alive at one time.
    """

    saved: int
    weight_copies: int
    peak: int


class _LiveBytes(DispatchObserver):
    """Counts the storages that are allocated while it is on, until they are released.

    ``model_states`` holds the keys of the storages that are not counted.
    """

    def __init__(self, model_states: set[int]) -> None:
        super().__init__()
        self.model_states = model_states
        self.live: dict[int, tuple[int, Any]] = {}
        self.now = 0
        self.peak = 0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return output

    def add(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self.live or key in self.model_states:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def released(_reference: Any, key: int = key, size: int = size) -> None:
            del self.live[key]
            self.now -= size

        self.live[key] = (size, weakref.ref(storage, released))
        self.now += size
        self.peak = max(self.peak, self.now)


def with_labels(model: Any, inputs: ExampleInputs) -> ExampleInputs:
    """A language model gets labels, so that it makes its own loss."""
    tokens = inputs.kwargs.get("decoder_input_ids", inputs.kwargs.get("input_ids"))
    takes_labels = "labels" in inspect.signature(base_model(model).forward).parameters
    if tokens is None or not takes_labels or output_head(model) is None:
        return inputs
    return ExampleInputs(inputs.args, {**inputs.kwargs, "labels": tokens})


def loss_or_output(output: Any) -> Tensor:
    """The model's own loss, or the first tensor of its output that needs a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)


def run_step(model: nn.Module, inputs: ExampleInputs) -> None:
    """Forward, loss and backward; without a loss of the model's own the output's gradient is 1."""
    inputs = with_labels(model, inputs)
    # held during the backward, as a training loop holds it, with its logits
    output = model(*inputs.args, **inputs.kwargs)
    result = loss_or_output(output)
    torch.autograd.backward(result, torch.ones_like(result))


def _peak(shadow: Shadow) -> int:
    model, inputs = shadow.model, shadow.inputs
    torch.clear_autocast_cache()
    with contextlib.ExitStack() as contexts:
        if shadow.mode is not None:
            contexts.enter_context(shadow.mode)
        if shadow.elsewhere:
            contexts.enter_context(GpuDropouts())
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        model_states = [*model.parameters(), *model.buffers(), *gradients]
        live = contexts.enter_context(_LiveBytes(set(map(storage_key, model_states))))
        for tensor in tree_leaves((inputs.args, inputs.kwargs)):
            if isinstance(tensor, Tensor):
                live.add(tensor)
        contexts.enter_context(torch.enable_grad())
        run_step(model, inputs)
    for parameter in trained:
        parameter.grad = None
    torch.clear_autocast_cache()
    return int(live.peak)


def step_bytes(shadow: Shadow) -> StepBytes:
    """Run the forward, then a whole step, of a shadow in training mode.

    Raises:
        TraceError: the forward or the backward fails.
    """
    shadow.model.train()
    saved = trace_forward(shadow, structure=False).saved
    try:
        peak = _peak(shadow)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, StopIteration) as error:
        raise TraceError(
            f"a training step of {type(shadow.model).__name__} could not be run on fake tensors: "
            f"{type(error).__name__}: {error}"
        ) from error
    return StepBytes(saved.activations, saved.weight_copies, peak)
