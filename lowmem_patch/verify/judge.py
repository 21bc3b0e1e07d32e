"""Run the unpatched model and a candidate in one dtype, and compare outputs and gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.checkpoint.compare import (
    StayInFloat64,
    TensorCheck,
    cast_parameters,
    check_outputs,
    check_tensor,
    named_outputs,
)
from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import TraceError
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.saved_bytes import saved_bytes
from lowmem_patch.verify.result import RunResult

__all__ = ["GRADIENT_FACTOR", "Judge", "map_gradients"]

GRADIENT_FACTOR = 3.0
# The direction of a gradient is known when its size is this many times the unpatched model's error.
_KNOWN_DIRECTION = 10.0


@dataclasses.dataclass
class _Run:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    saved: int = 0
    weight_copies: int = 0


def _integers(shape: torch.Size, seed: int) -> Tensor:
    """Random small integers: a gradient of the outputs that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator)


def _run(
    model: nn.Module,
    inputs: ExampleInputs,
    seed: int,
    *,
    autocast: torch.dtype | None = None,
    float64: bool = False,
    gradients: bool = True,
) -> _Run:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        )
        torch.manual_seed(seed)
        stack.enter_context(torch.set_grad_enabled(gradients))
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, dtype=autocast))
        if float64:
            stack.enter_context(StayInFloat64())
        saved = stack.enter_context(saved_bytes(model))
        outputs = dict(named_outputs(model(*inputs.args, **inputs.kwargs)))
    if not outputs:
        raise TraceError(
            f"{type(model).__name__} returns no floating-point tensor, so there is nothing to compare"
        )
    run = _Run({name: t.detach().double() for name, t in outputs.items()}, {})
    run.saved, run.weight_copies = saved.activations, saved.weight_copies
    if gradients:
        ends = [t for t in outputs.values() if t.requires_grad]
        starts = [_integers(t.shape, seed + i).to(t) for i, t in enumerate(ends)]
        if ends:
            torch.autograd.backward(ends, starts)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                run.gradients[name] = parameter.grad.double()
        model.zero_grad(set_to_none=True)
    return run


def map_gradients(
    gradients: Mapping[str, Tensor], original: Mapping[str, Tensor], steps: Iterable[FoldStep]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Gradients of a folded model as gradients of the unfolded one, in float64.

    With W' = W diag(g) and b' = b + W beta:
    dL/dW = dL/dW' diag(g) + dL/db' beta^T, dL/dg_i = sum_o (dL/dW')_oi W_oi, dL/dbeta = W^T dL/db'.

    Args:
        gradients: of the folded model's parameters.
        original: parameters of the unfolded model.
        steps: what was folded.

    Returns:
        The mapped gradients, and the names of parameters for which the folded model's frozen
        parameters leave them unknown.
    """
    mapped = dict(gradients)
    unknown: list[str] = []
    for step in steps:
        gamma = (
            original[step.weight].double() + step.weight_offset if step.weight is not None else None
        )
        beta = original[step.bias].double() if step.bias is not None else None
        moved = beta is not None and bool((beta != 0).any())
        for name in (step.weight, step.bias):
            if name is not None:
                mapped.pop(name, None)
        of_gamma: Tensor | None = None if gamma is None else torch.zeros_like(gamma)
        of_beta: Tensor | None = None if beta is None else torch.zeros_like(beta)
        for linear in step.linears:
            weight = original[linear.weight].double()
            new = gradients.get(linear.weight)
            of_bias = gradients.get(linear.bias) if linear.bias is not None else None
            if linear.transposed:
                weight, new = weight.t(), new if new is None else new.t()
            of_gamma = (
                None
                if of_gamma is None or new is None
                else of_gamma + (new.double() * weight).sum(0)
            )
            of_beta = (
                None
                if of_beta is None or of_bias is None
                else of_beta + weight.t() @ of_bias.double()
            )
            if new is None:
                continue
            if moved and of_bias is None:
                mapped.pop(linear.weight, None)
                unknown.append(linear.weight)
                continue
            result = new.double() if gamma is None else new.double() * gamma
            if moved and beta is not None and of_bias is not None:
                result = result + torch.outer(of_bias.double(), beta)
            mapped[linear.weight] = result.t() if linear.transposed else result
        for name, value in ((step.weight, of_gamma), (step.bias, of_beta)):
            if name is not None and value is not None:
                mapped[name] = value
            elif name is not None:
                unknown.append(name)
    return mapped, tuple(unknown)


def _relative_error(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Of all gradients together."""
    size = sum(float(t.square().sum()) for t in truth.values()) ** 0.5
    error = (
        sum(float((found[name] - t).square().sum()) for name, t in truth.items() if name in found)
        ** 0.5
    )
    return error / size if size else 0.0


def _check_gradients(
    truth: _Run, unpatched: _Run, found: Mapping[str, Tensor], eps: float
) -> list[TensorCheck]:
    """Judge each gradient by the unpatched model's error on it, or on all gradients if that is larger.

    A gradient that is 0 in exact arithmetic (a key's bias) is nothing but rounding, so its errors are
    measured against the model's mean gradient.
    """
    count = sum(t.numel() for t in truth.gradients.values())
    mean = (sum(float(t.square().sum()) for t in truth.gradients.values()) / max(count, 1)) ** 0.5
    overall = _relative_error(unpatched.gradients, truth.gradients)
    checks = []
    for name, gradient in truth.gradients.items():
        own = unpatched.gradients.get(name, torch.zeros_like(gradient))
        other = found.get(name, torch.full_like(gradient, torch.nan))
        scale = mean * gradient.numel() ** 0.5
        check = check_tensor(
            name, gradient, own, other, factor=GRADIENT_FACTOR, eps=eps, scale=scale, floor=overall
        )
        checks.append(check)
    return checks


def _as_approximate(check: TensorCheck) -> TensorCheck:
    """An approximate derivative passes when it is finite and, where there is a direction, follows it."""
    finite = check.error < float("inf")
    known = check.size > _KNOWN_DIRECTION * check.unpatched_error
    return dataclasses.replace(
        check, limit=float("inf"), passed=finite and (check.cosine > 0 or not known)
    )


@dataclasses.dataclass
class Judge:
    """Runs the unpatched model once per dtype and compares candidates with it."""

    model: nn.Module
    inputs: ExampleInputs
    seed: int
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        # rounded to what every dtype holds, so that the inputs' rounding is nobody's error
        self.inputs = self.inputs.map(
            lambda t: t.to(torch.bfloat16).double() if t.is_floating_point() else t
        )
        exact = self.copy_in(torch.float64)
        try:
            self.truth = _run(exact, self.inputs, self.seed, float64=True)
        except RuntimeError as error:
            # a model may mix its own float32 tensors with float64 ones in one op
            self.notes.append(
                f"truth keeps the model's own float32 steps: {str(error).splitlines()[0]}"
            )
            self.truth = _run(exact, self.inputs, self.seed)
        self.parameters = {name: p.detach() for name, p in exact.named_parameters()}

    def copy_in(self, dtype: torch.dtype) -> Any:
        return cast_parameters(copy.deepcopy(self.model), dtype).eval()

    def inputs_in(self, dtype: torch.dtype) -> ExampleInputs:
        return self.inputs.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def judge(
        self,
        label: str,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        candidate: Callable[[PatchConfig | None], tuple[Any, Sequence[FoldStep], Sequence[str]]],
        exact_config: PatchConfig | None,
    ) -> RunResult:
        inputs, eps = self.inputs_in(dtype), torch.finfo(autocast or dtype).eps
        own = _run(self.copy_in(dtype), inputs, self.seed, autocast=autocast)
        model, steps, approximate = candidate(None)
        found = _run(model, inputs, self.seed, autocast=autocast)
        del model
        outputs = check_outputs(self.truth.outputs, own.outputs, found.outputs, eps)
        gradients = self._gradients(own, found, steps, eps)
        coarse: list[TensorCheck] = []
        if approximate:
            coarse = [_as_approximate(check) for check in gradients]
            model, steps, _ = candidate(exact_config)
            gradients = self._gradients(
                own, _run(model, inputs, self.seed, autocast=autocast), steps, eps
            )
        return RunResult(
            label, outputs, tuple(gradients), tuple(coarse),
            own.saved, found.saved, own.weight_copies, found.weight_copies,
        )  # fmt: skip

    def _gradients(
        self, own: _Run, found: _Run, steps: Sequence[FoldStep], eps: float
    ) -> list[TensorCheck]:
        mapped, unknown = map_gradients(found.gradients, self.parameters, steps)
        lost = [name for name in unknown if name in self.truth.gradients]
        if lost:
            note = f"not compared, folded into what is frozen or has no bias: {', '.join(lost)}"
            if note not in self.notes:
                self.notes.append(note)
        checks = _check_gradients(self.truth, own, mapped, eps)
        return [check for check in checks if check.name not in lost]
