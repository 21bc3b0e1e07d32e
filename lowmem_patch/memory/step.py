"""One training step on fake tensors, with every storage counted from its allocation to its release.

The sum is the eager allocation of a real step, without data. Of what kernels take for themselves, that of a
table's gradient is counted (`lowmem_patch.tracing.gpu_temporaries`). The CUDA context (about 0.5 GiB) is not,
nor what the allocator rounds up, nor its fragmentation.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowmem_patch.errors import LowmemPatchError, TraceError
from lowmem_patch.memory.base_model import base_model, output_head
from lowmem_patch.memory.live_bytes import (
    AFTER_BACKWARD,
    AFTER_LOSS,
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    LiveBytes,
    Part,
    PartBytes,
)
from lowmem_patch.memory.optimizers import FakeOptimizer
from lowmem_patch.tracing.gpu_dropout import GpuDropouts
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.observers import observed_calls
from lowmem_patch.tracing.shadow import Shadow


def with_labels(model: Any, inputs: ExampleInputs) -> ExampleInputs:
    """A language model gets labels, so that it makes its own loss."""
    tokens = inputs.kwargs.get("decoder_input_ids", inputs.kwargs.get("input_ids"))
    takes_labels = "labels" in inspect.signature(base_model(model).forward).parameters
    if tokens is None or not takes_labels or output_head(model) is None:
        return inputs
    return ExampleInputs(inputs.args, {**inputs.kwargs, "labels": tokens})


def as_on_data(model: nn.Module, inputs: ExampleInputs) -> ExampleInputs:
    """Inputs for a step on fake tensors that take the same way through a transformers model as data.

    A model without a cache of keys and values looks whether positions tell of packed sequences. On fake
    tensors, whose values nobody knows, it makes an attention mask for them, and repeats the keys and values
    of grouped heads (`transformers.masking_utils.find_packed_sequence_indices`). It does not look where it
    gets a cache: this one holds nothing.
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    given = {name for name, value in inputs.kwargs.items() if value is not None}
    # transformers' own checkpointing turns the cache off
    checkpointed = any(vars(module).get("gradient_checkpointing") for module in base.modules())
    if (
        not (checkpointed or getattr(config, "use_cache", None) is False)
        or getattr(config, "is_encoder_decoder", False)
        or "past_key_values" not in inspect.signature(base.forward).parameters
        or given & {"attention_mask", "position_ids", "past_key_values"}
    ):
        return inputs
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return inputs

    class NothingCached(library.DynamicCache):  # type: ignore[name-defined, misc]  # of a module found late
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    return ExampleInputs(inputs.args, {**inputs.kwargs, "past_key_values": NothingCached()})


def step_loss(output: Any) -> Tensor:
    """The model's own loss, or the mean square of the first tensor of its output that needs a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
    return first.float().square().mean()


def run_step(model: nn.Module, inputs: ExampleInputs) -> None:
    """Forward, loss and backward. The outputs are released before the backward, as trainers do; a loop
    that holds them holds the logits for longer."""
    inputs = with_labels(model, inputs)
    loss = step_loss(model(*inputs.args, **inputs.kwargs))
    torch.autograd.backward(loss)


@contextlib.contextmanager
def _observed_moments(
    model: nn.Module, live: LiveBytes, blocks: nn.Module | None
) -> Iterator[None]:
    """Tell ``live`` when a block begins, when the last one ends, and where the loss begins: behind the
    last module that has parameters and no children, such as the head."""
    names = {id(module): name for name, module in model.named_modules()}
    children = [] if blocks is None else list(blocks.children())
    places = {names[id(child)]: place for place, child in enumerate(children, 1)}
    last = next(reversed(places), None)

    def enter(name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if name in places and live.moment in (FORWARD, LOSS):
            live.enter(FORWARD, places[name])

    def leave(name: str, module: nn.Module, _output: Any) -> None:
        if live.moment not in (FORWARD, LOSS):
            return  # computed again in the backward
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            live.not_the_loss()
            live.begin(LOSS)
        if name == last:
            live.enter(FORWARD, len(places) + 1)

    with observed_calls(model, enter, leave):
        yield


def step_parts(
    shadow: Shadow,
    *,
    optimizer: str | FakeOptimizer = "adamw",
    accumulates: bool = False,
    blocks: nn.Module | None = None,
) -> Mapping[Part, PartBytes]:
    """Run a whole step of a shadow in training mode.

    Args:
        optimizer: one of ``OPTIMIZERS``, or the one of an earlier step of this shadow.
        accumulates: gradients of an earlier batch are held from the beginning of the step.
        blocks: a list of blocks of the shadow's model, each of which is a place of its own.

    Raises:
        ConfigError: an unknown optimizer.
        TraceError: the forward or the backward fails.
    """
    shadow.model.train()
    try:
        return _parts(shadow, optimizer, accumulates, blocks)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, StopIteration) as error:
        if isinstance(error, LowmemPatchError):
            raise
        raise TraceError(
            f"a training step of {type(shadow.model).__name__} could not be run on fake tensors: "
            f"{type(error).__name__}: {error}"
        ) from error


def _parts(
    shadow: Shadow, optimizer: str | FakeOptimizer, accumulates: bool, blocks: nn.Module | None
) -> Mapping[Part, PartBytes]:
    model = shadow.model
    inputs = as_on_data(model, with_labels(model, shadow.inputs))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.clear_autocast_cache()
    with contextlib.ExitStack() as contexts:
        if shadow.mode is not None:
            contexts.enter_context(shadow.mode)
        if shadow.elsewhere:
            contexts.enter_context(GpuDropouts())
        fake = optimizer
        if isinstance(fake, str):
            fake = FakeOptimizer(fake, trained if shadow.mode is not None else ())
        gradients: list[Tensor] = []
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter) if accumulates else None
            gradients += [] if parameter.grad is None else [parameter.grad]
        held = [*model.parameters(), *model.buffers(), *shadow.beside, *fake.state]
        live: LiveBytes = contexts.enter_context(
            LiveBytes(held, gradients, shadow.packed, on_gpu=shadow.on_gpu)
        )
        if not accumulates:
            for parameter in trained:
                register: Any = parameter.register_post_accumulate_grad_hook  # has no types
                contexts.callback(register(live.made_gradient).remove)
        gradients.clear()
        for tensor in tree_leaves((inputs.args, inputs.kwargs)):
            if isinstance(tensor, Tensor):
                live.add(tensor)
        contexts.enter_context(torch.enable_grad())
        with _observed_moments(model, live, blocks):
            loss = step_loss(model(*inputs.args, **inputs.kwargs))
            live.mark(AFTER_LOSS)
            live.begin(BACKWARD)
            torch.autograd.backward(loss)
        live.mark(AFTER_BACKWARD)
        live.enter(OPTIMIZER, 0)
        fake.step()
    for parameter in trained:
        parameter.grad = None
    torch.clear_autocast_cache()
    return live.result()
