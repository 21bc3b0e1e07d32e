"""A copy of a model that can be run for a trace: its parameters are fake tensors (shapes and dtypes, no
data), so a trace costs no memory and works for meta models."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.fake_mode import make_fake_mode, values_of
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import is_offloaded, running_fake
from lowmem_patch.tracing.no_cache import as_on_data
from lowmem_patch.tracing.quantised import Fakes
from lowmem_patch.tracing.sharded import came_sharded, whole_twin

_NO_TREES = frozenset((NoneType, bool, int, float, str, torch.dtype, torch.device))


class DataNeededError(TraceError):
    """The model holds tensors that have no fake: trace it on real data."""


@dataclasses.dataclass
class Shadow:
    """A model that can be run for a trace, with its inputs, in the context that it needs.

    Attributes:
        elsewhere: the model is on the meta device, and will run on a GPU.
        packed: its quantised weights of few bits.
        beside: what holds quantised weights beside parameters and buffers.
        needs_data: why it cannot be run on fake tensors, where it has no mode.
    """

    model: nn.Module
    inputs: ExampleInputs
    mode: FakeTensorMode | None
    elsewhere: bool = False
    packed: tuple[Tensor, ...] = ()
    beside: tuple[Tensor, ...] = ()
    needs_data: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU, or will be."""
        # `is_cuda` of a fake tensor is an op
        return self.elsewhere or any(p.device.type == "cuda" for p in self.model.parameters())

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """The context of whatever runs it."""
        return contextlib.nullcontext() if self.mode is None else running_fake(self.mode)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in the order of torch's ``tree_leaves``."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    """What each op is asked for, several times: torch's own walk over a tuple takes ten times as long."""
    if isinstance(value, Tensor):
        found.append(value)
        return
    kind = type(value)
    if kind is tuple or kind is list:
        for each in value:
            _collect(each, found)
    elif kind is dict or kind is OrderedDict:  # of a module's hooks
        for each in value.values():
            _collect(each, found)
    elif kind not in _NO_TREES:
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def output_tensors(output: Any) -> list[Tensor]:
    """Every tensor in what a model returned, also in a ModelOutput, another mapping or a dataclass."""
    return [tensor for _, tensor in named_tensors(output)]


def named_tensors(output: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """As `output_tensors`, each with its place in the output."""
    if isinstance(output, Tensor):
        yield place or "output", output
        return
    parts: Any
    if callable(getattr(output, "items", None)):
        parts = output.items()
    elif dataclasses.is_dataclass(output) or isinstance(output, SimpleNamespace):
        parts = vars(output).items()
    elif isinstance(output, (tuple, list)):
        parts = enumerate(output)
    else:
        parts = enumerate(tensors_in(output))
    for key, part in parts:
        first = key if isinstance(key, str) else f"output {key}"
        yield from named_tensors(part, f"{place}.{key}" if place else first)


def finite_parts(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """Tensors of one shape with 0 for infinities, with which models mask; None where these differ."""
    if not any(bool(tensor.isinf().any()) for tensor in tensors):
        return tensors
    infinities = [torch.where(tensor.isinf(), tensor, 0.0).double() for tensor in tensors]
    if any(not torch.equal(infinities[0], other) for other in infinities[1:]):
        return None
    return tuple(tensor.masked_fill(tensor.isinf(), 0.0) for tensor in tensors)


def make_shadow(model: nn.Module, inputs: ExampleInputs) -> Shadow:
    """A copy of ``model`` with fake parameters, and fake inputs. The model is not touched.

    The copy of a model that came sharded is whole.

    Raises:
        TraceError: the model cannot be copied, or holds tensors that cannot be faked.
    """
    if is_offloaded(model):
        raise DataNeededError(
            "its weights are offloaded, and come at each call: patch before that to save more"
        )
    mode = make_fake_mode()
    elsewhere = any(parameter.is_meta for parameter in model.parameters())
    somewhere = torch.device("cpu")
    if came_sharded(model):
        somewhere = next(model.parameters()).device
        model = whole_twin(model)
    # what an earlier forward left on a module (LeViT's tables of biases) may hang on its graph, which
    # cannot be copied
    memo: dict[int, Any] = {
        id(tensor): tensor.detach()
        for module in model.modules()
        for tensor in tensors_in(attributes_of(module))
        if node_of(tensor) is not None
    }
    try:
        found = Fakes(model, mode, somewhere)
    except TypeError as error:
        raise DataNeededError(f"{error}, which cannot be traced without data") from error
    memo |= found.memo
    try:
        shadow = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        raise TraceError(f"the model cannot be copied for a trace: {error}") from error
    for given, copied in zip(model.modules(), shadow.modules(), strict=True):
        # of a compiled module torch copies what it was; nothing is compiled here
        if given._compiled_call_impl is not None:
            copied.compile()
    for buffer, fake in zip(model.buffers(), shadow.buffers(), strict=True):
        if buffer.layout is torch.strided and buffer.nbytes <= _SMALL:
            values_of(mode).give(fake, buffer)
    fakes = as_on_data(shadow, fake_inputs(inputs, mode))
    return Shadow(shadow, fakes, mode, elsewhere, found.packed, found.beside)


def fake_inputs(
    inputs: ExampleInputs, mode: FakeTensorMode, device: torch.device | None = None
) -> ExampleInputs:
    """Inputs without data, on ``device`` or where they are; the mode knows their values."""

    def fake_of(tensor: Tensor) -> Tensor:
        there = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        with mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=there
            )
        values_of(mode).give(fake, tensor)
        return fake.requires_grad_(tensor.requires_grad)

    return inputs.map(fake_of)


_SMALL = 1 << 16  # bytes of a buffer whose values a forward may look at


def node_of(tensor: Tensor) -> Any:
    """The ``grad_fn``; None also where torch raises in its place: for a part of a chunk, after a write into
    the whole."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def attributes_of(module: nn.Module) -> list[Any]:
    """Tensors that a forward left on a module, for somebody to read: as good as returned."""
    own = ("_parameters", "_modules")
    return [value for name, value in vars(module).items() if name not in own]
