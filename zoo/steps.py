"""Run a model for a comparison: one forward and backward, in a precision of the zoo or in float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_patch import saved_bytes
from lowmem_patch.tracing.inputs import ExampleInputs
from zoo.build import tensors_of
from zoo.precision import FLOAT32, Precision


@dataclasses.dataclass
class Step:
    """Outputs and parameter gradients of one step, in float64, what autograd kept, and their own dtypes."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    saved: int
    dtypes: dict[str, torch.dtype]


class _StayInFloat64(TorchDispatchMode):
    """Undoes a model's own float32 (norms, softmax, tables), which would spoil the truth."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        if isinstance(wanted, torch.dtype) and wanted.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def _all_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _StayInFloat64():
            yield
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def buffers_stay(model: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def in_float64(model: nn.Module) -> Any:
    """A float64 copy. Grouped matmuls have no float64, so experts run one after the other."""
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
    return wide


def jittered(model: nn.Module, seed: int, precision: Precision = FLOAT32) -> Any:
    """A copy with every weight moved by at most one unit in the last place of this precision."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                sign = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter *= 1 + sign.to(parameter) * precision.eps
    return moved


def run_step(
    model: Any,
    inputs: ExampleInputs,
    *,
    train: bool,
    precision: Precision = FLOAT32,
    float64: bool = False,
) -> Step:
    """One forward; in training mode also the backward of a fixed random projection of all outputs."""
    if float64:
        inputs = inputs.map(lambda t: t.double() if t.is_floating_point() else t)
    model.train(train)
    torch.manual_seed(3)
    context = _all_float64() if float64 else contextlib.nullcontext()
    gradients = {}
    with context, buffers_stay(model):
        if train:
            with saved_bytes(model) as saved, autocast(precision):
                outputs = tensors_of(model(*inputs.args, **inputs.kwargs))
            _backward(outputs)
            named = model.named_parameters()
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            model.zero_grad(set_to_none=True)
        else:
            with autocast(precision):
                outputs = tensors_of(model(*inputs.args, **inputs.kwargs))
    model.eval()
    dtypes = {f"output {index}": tensor.dtype for index, tensor in enumerate(outputs)}
    dtypes |= {f"the gradient of {name}": tensor.dtype for name, tensor in gradients.items()}
    return Step(
        [tensor.detach().double() for tensor in outputs],
        {name: tensor.double() for name, tensor in gradients.items()},
        saved.activations if train else 0,
        dtypes,
    )


def autocast(precision: Precision) -> contextlib.AbstractContextManager[Any]:
    if precision.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(precision.device, precision.autocast)


def _backward(outputs: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    if not trained:
        return
    weights = [torch.randint(-8, 9, t.shape, generator=generator).to(t) / 8 for t in trained]
    torch.autograd.backward(trained, weights)
