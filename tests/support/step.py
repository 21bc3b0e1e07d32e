"""One training step of any model: its outputs, its gradients and the bytes that it saves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowmem_patch import saved_bytes

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Mode:
    """The dtype of the weights, and autocast's where it is on."""

    weights: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def eps(self) -> float:
        return torch.finfo(self.autocast or self.weights).eps


MODES = {
    "fp32": Mode(torch.float32),
    "bf16": Mode(torch.bfloat16),
    "autocast": Mode(torch.float32, torch.bfloat16),
}
FP32, BF16, AUTOCAST = MODES.values()
DOUBLE = Mode(torch.float64)


class StayInFloat64(TorchDispatchMode):
    """Undoes a model's own casts to float32 (RMSNorm, softmax), which would spoil the truth."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs["dtype"] = torch.float64
        # positions, cast from integers, meet a rotary table in float64 (transformers before 5.8)
        if func is torch.ops.aten.bmm.default and args[0].dtype != args[1].dtype:
            args = (args[0].double(), args[1].double())
        return func(*args, **kwargs)


class Step(NamedTuple):
    """What a step gives, each tensor in its own dtype.

    ``gradients`` holds those of the parameters by name, and of inputs that need one as ``input.NAME``.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    saved: int = 0

    @property
    def output(self) -> Tensor:
        return self.outputs[0]


def cast(model: nn.Module, dtype: torch.dtype) -> Any:
    """Cast in place, but for rotary tables: in bf16 they would drown what is measured."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and "inv_freq" not in name:
                module._buffers[name] = buffer.to(dtype)
    return model


def tensors_of(output: Any) -> list[Tensor]:
    """The floating tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "values"):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def named(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors among the inputs by their names, or by their places."""
    if isinstance(inputs, Mapping):
        return {name: tensor for name, tensor in inputs.items() if isinstance(tensor, Tensor)}
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    return {str(place): tensor for place, tensor in enumerate(inputs)}


def in_mode(inputs: Any, mode: Mode) -> Any:
    """The inputs with the dtype that a user of such weights would pass."""
    return tree_map_only(
        Tensor, lambda t: t.to(mode.weights) if t.is_floating_point() else t, inputs
    )


def call(model: Any, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(*inputs)


def _own(inputs: Any) -> Any:
    """Copies, which a dropout may write into and which hold gradients of this step alone."""
    return tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs
    )


def _gradients(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    tensors = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    tensors |= {f"input.{name}": tensor for name, tensor in named(inputs).items()}
    return {name: t.grad for name, t in tensors.items() if t.is_leaf and t.grad is not None}


def step(
    model: Any,
    inputs: Any,
    mode: Mode | None = None,
    *,
    seed: int = 3,
    backward: bool = True,
    count: bool = False,
) -> Step:
    """One forward and backward from one seed; the gradient of the first output is small integers.

    Without a ``mode`` the inputs keep their dtypes and the caller's autocast holds. To count saved
    bytes puts hooks on every module.
    """
    inputs = _own(inputs if mode is None else in_mode(inputs, mode))
    device = next(iter(named(inputs).values())).device.type
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with contextlib.ExitStack() as stack:
        if mode is not None and mode.weights == torch.float64:
            stack.enter_context(StayInFloat64())
        if mode is not None and mode.autocast is not None:
            stack.enter_context(torch.autocast(device, mode.autocast))
        saved = stack.enter_context(saved_bytes(model)) if count else None
        outputs = tensors_of(call(model, inputs))
    gradients = {}
    if backward:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(-8, 9, outputs[0].shape, generator=generator)
        outputs[0].backward(start.to(outputs[0]))
        gradients = _gradients(model, inputs)
        model.zero_grad(set_to_none=True)
    found = [tensor.detach() for tensor in outputs]
    return Step(found, gradients, 0 if saved is None else saved.activations)


def truth_of(model: nn.Module, inputs: Any, *, backward: bool = True) -> Step:
    """The same step in float64, of a copy."""
    return step(cast(copy.deepcopy(model), torch.float64), inputs, DOUBLE, backward=backward)


def twin_of(original: nn.Module, patched: nn.Module) -> Any:
    """An unpatched model with the weights that the patched one has now (folded ones, too)."""
    twin = copy.deepcopy(original)
    twin.load_state_dict(patched.state_dict())
    trains = {name: p.requires_grad for name, p in patched.named_parameters()}
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(trains[name])
    return twin


def trained(model: Any, inputs: Any, steps: int = 20, average: Any = None) -> Any:
    """The float64 model after some steps of AdamW with weight decay; ``average`` follows each step."""
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=1e-3, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with StayInFloat64():
            tensors_of(call(model, inputs))[0].square().mean().backward()
        optimizer.step()
        if average is not None:
            average(model)
    return model


def bytes_of(model: nn.Module, inputs: Any) -> int:
    """Saved bytes of one forward of a copy, of which no warning is given."""
    model = copy.deepcopy(model)
    with warned(), saved_bytes(model) as saved:
        call(model, inputs)
    return saved.activations


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        yield texts
    texts += [str(warning.message) for warning in found]
