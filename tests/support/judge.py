"""Running models for a comparison, and error budgets that come from float64 references."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.patching.families import Family, Inputs

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# allowed on top, in eps of the dtype: a value that the unpatched model happens to hit exactly
BAND = 4.0
EXACT = {"norms": "fold", "activations": "recompute"}  # fold as well, but no approximate derivative


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


class _StayInFloat64(TorchDispatchMode):
    """Undoes a model's own casts to float32 (RMSNorm, softmax), which would spoil the truth."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclasses.dataclass
class Run:
    """Outputs and parameter gradients of one step, in float64."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def randomise(model: nn.Module, seed: int = 1) -> Any:
    """Move gammas, betas and biases away from 1 and 0, and every weight to what bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter += noise
            elif parameter.dim() == 1:
                parameter += 0.5 * noise
            elif "lora_B" in name:
                parameter += 0.2 * noise
            parameter.copy_(parameter.bfloat16())
    return model


def build(family: Family, seed: int = 1) -> Any:
    """A model of the family with random weights; eval mode, so that repeated runs agree."""
    torch.manual_seed(seed)
    return randomise(family.build(), seed).eval()


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
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "values"):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def in_mode(inputs: Inputs, mode: Mode) -> Inputs:
    """The inputs with the dtype that a user of such weights would pass."""
    return {k: v.to(mode.weights) if v.is_floating_point() else v for k, v in inputs.items()}


def run(model: Any, inputs: Inputs, mode: Mode, *, seed: int = 3, backward: bool = True) -> Run:
    """One forward and backward; the gradient of the first output is random small integers."""
    float64 = mode.weights == torch.float64
    inputs = in_mode(inputs, mode)
    torch.manual_seed(seed)
    with contextlib.ExitStack() as stack:
        if float64:
            stack.enter_context(_StayInFloat64())
        if mode.autocast is not None:
            stack.enter_context(torch.autocast("cpu", mode.autocast))
        outputs = tensors_of(model(**inputs))
    gradients = {}
    if backward:
        generator = torch.Generator().manual_seed(seed)
        shape = outputs[0].shape
        outputs[0].backward(torch.randint(-8, 9, shape, generator=generator).to(outputs[0]))
        gradients = {
            name: parameter.grad.double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        model.zero_grad(set_to_none=True)
    return Run([tensor.detach().double() for tensor in outputs], gradients)


def truth_of(model: nn.Module, inputs: Inputs) -> Run:
    """The same step in float64, of a copy."""
    return run(cast(copy.deepcopy(model), torch.float64), inputs, Mode(torch.float64))


def assert_outputs(found: Run, unpatched: Run, truth: Run, mode: Mode) -> None:
    """Relative L2 errors against float64: ours at most twice the unpatched model's."""
    assert len(found.outputs) == len(truth.outputs)
    for ours, theirs, exact in zip(found.outputs, unpatched.outputs, truth.outputs, strict=True):
        assert ours.shape == exact.shape
        size = float(exact.norm())
        error, own = (float((t - exact).norm()) / size for t in (ours, theirs))
        assert error <= FORWARD_FACTOR * own + BAND * mode.eps, (error, own)


def assert_gradients(found: Run, unpatched: Run, truth: Run, mode: Mode) -> None:
    """Each gradient's error: at most three times the unpatched model's on it, or on all of them.

    A gradient that is 0 in exact arithmetic (a key's bias) is nothing but rounding, so errors are
    measured against at least the model's mean gradient.
    """
    assert set(found.gradients) == set(truth.gradients)
    assert truth.gradients
    squares = sum(float(t.square().sum()) for t in truth.gradients.values())
    mean = (squares / sum(t.numel() for t in truth.gradients.values())) ** 0.5
    wrong = sum(
        float((unpatched.gradients[name] - t).square().sum()) for name, t in truth.gradients.items()
    )
    overall = (wrong / squares) ** 0.5
    for name, exact in truth.gradients.items():
        size = max(float(exact.norm()), mean * exact.numel() ** 0.5)
        error = float((found.gradients[name] - exact).norm()) / size
        own = float((unpatched.gradients[name] - exact).norm()) / size
        assert error <= GRADIENT_FACTOR * max(own, overall) + BAND * mode.eps, (name, error, own)


def assert_same_step(patched: Any, twin: Any, inputs: Inputs, mode: Mode) -> None:
    """A patched model and an unpatched one with the same weights: outputs and gradients agree.

    ``twin`` must hold its weights in ``mode``'s dtype already; the truth is ``twin`` in float64.
    """
    truth, own, found = truth_of(twin, inputs), run(twin, inputs, mode), run(patched, inputs, mode)
    assert_outputs(found, own, truth, mode)
    assert_gradients(found, own, truth, mode)


def twin_of(original: nn.Module, patched: nn.Module) -> Any:
    """An unpatched model with the weights that the patched one has now (folded ones, too)."""
    twin = copy.deepcopy(original)
    twin.load_state_dict(patched.state_dict())
    trains = {name: p.requires_grad for name, p in patched.named_parameters()}
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(trains[name])
    return twin


def why_unsupported(function: Callable[..., Any], *args: Any) -> str:
    """Why torch.compile cannot trace the function in one graph; nothing if it can."""
    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend="eager")(*args)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def skip_where_torch_breaks_the_graph(unpatched: Any, inputs: Inputs) -> None:
    """Old torch with old transformers cannot trace some models, patched or not."""
    why = why_unsupported(lambda: unpatched(**inputs))
    if why:
        pytest.skip(f"torch itself breaks this graph: {why.splitlines()[0]}")
