"""A copy of a model that can be run for a trace: its parameters are fake tensors (shapes and dtypes, no
data), so a trace costs no memory and works for meta models. It runs as the model would on data."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import NoneType, SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lowmem_patch.errors import TraceError
from lowmem_patch.nn.caches import STANDS_FOR_NONE
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.tracing.base_model import base_model
from lowmem_patch.tracing.call_arguments import attention_call, dropout_call
from lowmem_patch.tracing.fake_mode import make_fake_mode, values_of
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import is_offloaded, running_fake
from lowmem_patch.tracing.observers import FunctionObserver
from lowmem_patch.tracing.op_roles import Role, function_name, role_of
from lowmem_patch.tracing.quantised import Fakes
from lowmem_patch.tracing.sharded import came_sharded, whole_twin

_NO_TREES = frozenset((NoneType, bool, int, float, str, torch.dtype, torch.device))
# what transformers calls the cache of keys and values: since 5.24, and before
_CACHES = ("cache", "past_key_values")


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

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of whatever runs it. Modes that record calls are entered inside, and see them as they
        are."""
        with contextlib.ExitStack() as contexts:
            if self.mode is not None:
                contexts.enter_context(running_fake(self.mode))
            if self.elsewhere:
                contexts.enter_context(_GpuDropouts())
            yield


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


def as_on_data(model: nn.Module, inputs: ExampleInputs) -> ExampleInputs:
    """Fake inputs that take the same way through a transformers model as data.

    A model without a cache of keys and values looks whether positions tell of packed sequences. On fake
    tensors, whose values nobody knows, it makes an attention mask for them, and repeats the keys and values
    of grouped heads (`transformers.masking_utils.find_packed_sequence_indices`). It does not look where it
    gets a cache: this one holds nothing, of keys and values as of states of recurrent layers.
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    takes = inspect.signature(base.forward).parameters
    cache = next((name for name in _CACHES if name in takes), None)
    given = {name for name, value in inputs.kwargs.items() if value is not None}
    adapters = getattr(model, "peft_config", {}).values()  # a trained prefix is a cache itself
    has_prompt = any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
    # transformers' own checkpointing turns the cache off
    checkpointed = any(vars(module).get("gradient_checkpointing") for module in base.modules())
    asked = inputs.kwargs.get("use_cache", getattr(config, "use_cache", None))
    if (
        not (checkpointed or asked is False)
        or getattr(config, "is_encoder_decoder", False)
        or cache is None
        or has_prompt
        or given & {"attention_mask", "position_ids", *_CACHES}
    ):
        return inputs
    library = sys.modules.get("transformers.cache_utils")
    if library is None or _is_of_own_kind(takes[cache].annotation, library.DynamicCache):
        return inputs

    class NothingCached(library.DynamicCache):  # type: ignore[name-defined, misc]  # of a module found late
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return False

        def get_conv_state(self, *_: Any, **__: Any) -> None:
            return None

        def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
            return states

        get_recurrent_state, update_recurrent_state = get_conv_state, update_conv_state

    setattr(NothingCached, STANDS_FOR_NONE, True)
    return ExampleInputs(inputs.args, {**inputs.kwargs, cache: NothingCached()})


def _is_of_own_kind(annotation: Any, common: type) -> bool:
    """Whether a cache is said to be of a class that the common one does not stand for (xLSTM's states)."""
    kinds = [kind for kind in get_args(annotation) if isinstance(kind, type)]
    named = [kind for kind in kinds if kind.__module__.startswith("transformers.")]
    return not all(issubclass(common, kind) for kind in named)


class _GpuDropouts(FunctionObserver):
    """Dropouts and attention as a GPU saves them, for models on the meta device, planned for another machine.

    On fake CPU tensors torch would count what its CPU code saves: a number of the tensor's dtype for each
    element of a dropout, and all the probabilities of an attention with dropout. On a GPU a dropout saves a
    bool, and fused attention draws its mask again. Attention with grouped queries is fused on a GPU; on a CPU
    old torch saves its probabilities.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function_name(func)
        # a deferred tensor draws its own mask
        if role_of(name).has(Role.DROPOUT) and args and not isinstance(args[0], Deferred):
            call = dropout_call(args, kwargs)
            if 0 < call.p < 1 and not call.in_place and args[0].numel():
                return torch.native_dropout(args[0], call.p, True)[0]
        if name == "scaled_dot_product_attention":
            given = attention_call(name, args, kwargs)
            # a GPU's fused kernels take no mask with grouped queries
            if kwargs.get("enable_gqa") and given.attn_mask is None and not _fuses_groups():
                return _Grouped.apply(*given[:3])  # type: ignore[no-untyped-call]  # of torch
            return func(**{**given._asdict(), **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


@functools.cache
def _fuses_groups() -> bool:
    """Whether torch's CPU code has a fused kernel for attention with grouped queries."""
    with _disable_current_modes():
        query, key = torch.empty(1, 2, 1, 8), torch.empty(1, 1, 1, 8)
        choice: int = torch._fused_sdp_choice(query, key, key, enable_gqa=True)
    return choice != 0


class _Grouped(torch.autograd.Function):
    """The shapes of fused attention, for fake tensors; saves q, k, v, the output and a log-sum-exp of each
    row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sum_exp = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
