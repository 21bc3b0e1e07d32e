"""Run the unpatched model and a candidate in one dtype, and compare outputs and gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.checkpoint.compare import (
    TensorCheck,
    cast_parameters,
    check_outputs,
    check_tensor,
    in_float64,
    named_outputs,
)
from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import TraceError
from lowmem_patch.planning.names import collapse_names
from lowmem_patch.strategies.fold_weights import FoldStep, fold_tensors
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.saved_bytes import saved_bytes
from lowmem_patch.verify.result import RunResult

# Takes the dtype of the parameters, and a preset in place of the candidate's own (None: its own).
# Returns the model, its folds, and the sites with approximate derivatives.
Candidate = Callable[
    [torch.dtype, PatchConfig | None], tuple[Any, Sequence[FoldStep], Sequence[str]]
]

GRADIENT_FACTOR = 3.0
# Where a gradient sums up terms that cancel, its error is that of a few roundings, in both models: one draw
# of the outputs' gradients does not tell rounding from a mistake. What fails is judged over so many more.
MORE_DRAWS = 4


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


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """What is drawn on the CPU and on the model's device follows from ``seed``; both states are put back."""
    device = _device(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _run(
    model: nn.Module,
    inputs: ExampleInputs,
    seed: int,
    *,
    autocast: torch.dtype | None = None,
    float64: bool = False,
) -> _Run:
    with contextlib.ExitStack() as stack:
        stack.enter_context(seeded(model, seed))
        stack.enter_context(torch.enable_grad())
        if autocast is not None:
            stack.enter_context(torch.autocast(_device(model).type, dtype=autocast))
        if float64:
            stack.enter_context(in_float64())
        saved = stack.enter_context(saved_bytes(model))
        outputs = dict(named_outputs(model(*inputs.args, **inputs.kwargs)))
    if not outputs:
        raise TraceError(
            f"{type(model).__name__} returns no floating-point tensor, so there is nothing to compare"
        )
    run = _Run({name: t.detach().double() for name, t in outputs.items()}, {})
    run.saved, run.weight_copies = saved.activations, saved.weight_copies
    ends = [t for t in outputs.values() if t.requires_grad]
    starts = [_integers(t.shape, seed + i).to(t) for i, t in enumerate(ends)]
    if ends:
        with in_float64() if float64 else contextlib.nullcontext():
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

    W' = W diag(g) and b' = b + W beta are differentiated by W, g and beta.

    Args:
        gradients: of the folded model's parameters.
        original: parameters of the unfolded model.
        steps: the folds.

    Returns:
        The mapped gradients, and the names of parameters for which the folded model's frozen
        parameters leave them unknown.
    """
    mapped = dict(gradients)
    unknown: list[str] = []
    for step in steps:
        for name, gradient in _unfolded_gradients(gradients, original, step).items():
            if gradient is None:
                mapped.pop(name, None)
                unknown.append(name)
            else:
                mapped[name] = gradient
    return mapped, tuple(unknown)


def _unfolded_gradients(
    gradients: Mapping[str, Tensor], original: Mapping[str, Tensor], step: FoldStep
) -> dict[str, Tensor | None]:
    """Gradients of the parameters that one step changed, in float64; None where unknown.

    A Linear's weight without a gradient of its own is left out.
    """
    affine = {name: _leaf(original[name]) for name in (step.weight, step.bias) if name is not None}
    gamma, beta = affine.get(step.weight or ""), affine.get(step.bias or "")
    shifts = beta is not None and bool((beta != 0).any())
    found: dict[str, Tensor | None] = {}
    of_affine: dict[str, list[Tensor | None]] = {name: [] for name in affine}
    for linear in step.linears:
        given = gradients.get(linear.weight), gradients.get(linear.bias or "")
        weight = _leaf(original[linear.weight])
        bias = weight.new_zeros(weight.shape[int(linear.transposed)])
        transposed, settings = linear.transposed, step.settings
        with torch.enable_grad():
            new = fold_tensors(weight, bias, gamma, beta, settings, transposed=transposed)
        of_weight, *rest = _gradients_behind(new, given, (weight, *affine.values()))
        if given[0] is not None:
            found[linear.weight] = None if shifts and given[1] is None else of_weight
        for parts, part in zip(of_affine.values(), rest, strict=True):
            parts.append(part)
    for name, parts in of_affine.items():
        found[name] = _sum_if_known(parts, torch.zeros_like(affine[name]))
    return found


def _sum_if_known(parts: Sequence[Tensor | None], start: Tensor) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return sum(known, start) if len(known) == len(parts) else None


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def _gradients_behind(
    outputs: Sequence[Tensor | None], given: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of ``inputs`` from those that are known of what was made from them."""
    pairs = [
        (output, gradient.double())
        for output, gradient in zip(outputs, given, strict=True)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if not pairs:
        return [None] * len(inputs)
    made, known = zip(*pairs, strict=True)
    return torch.autograd.grad(made, inputs, known, allow_unused=True)


def _norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all tensors together."""
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


class _Draw(NamedTuple):
    """Gradients by name, for one draw of the outputs' gradients.

    Attributes:
        truth, unpatched: in float64, and in the dtype that is judged.
        found: of the candidate, as gradients of the unpatched model.
    """

    truth: Mapping[str, Tensor]
    unpatched: Mapping[str, Tensor]
    found: Mapping[str, Tensor]

    def only(self, names: Iterable[str]) -> _Draw:
        """Without all other gradients."""
        kept = [{name: of[name] for name in names if name in of} for of in self]
        return _Draw(*kept)

    def of(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """One gradient; the unpatched model may lack it (0), the candidate may not (NaN)."""
        truth = self.truth[name]
        own = self.unpatched.get(name, torch.zeros_like(truth))
        return truth, own, self.found.get(name, torch.full_like(truth, torch.nan))


def _check_gradients(names: Iterable[str], draws: Sequence[_Draw], eps: float) -> list[TensorCheck]:
    """Judge each gradient by the unpatched model's error on it, or on all gradients if that is larger.

    A gradient that is 0 in exact arithmetic (a key's bias) is nothing but rounding, so its errors are
    measured against the model's mean gradient.

    Args:
        names: of the gradients to judge.
        draws: over which errors and sizes are summed; the first has all gradients.
        eps: of the dtype.
    """
    truth, own, _ = draws[0]
    size = _norm(truth.values())
    mean = size / max(sum(t.numel() for t in truth.values()), 1) ** 0.5
    error = _norm(own[name] - t for name, t in truth.items() if name in own)
    overall = error / size if size else 0.0
    checks = []
    for name in names:
        tensors = [torch.stack(parts) for parts in zip(*(d.of(name) for d in draws), strict=True)]
        scale = mean * tensors[0].numel() ** 0.5
        check = check_tensor(
            name, *tensors, factor=GRADIENT_FACTOR, eps=eps, scale=scale, floor=overall
        )
        checks.append(check)
    return checks


def _as_approximate(check: TensorCheck) -> TensorCheck:
    """The check of an approximate gradient: finite and, where the direction is known, along it."""
    finite = check.error < float("inf")
    along = check.cosine > 0 or not check.has_direction
    return dataclasses.replace(check, limit=float("inf"), passed=finite and along)


class _Arithmetic(NamedTuple):
    """The dtype of parameters and inputs, and that of autocast or None."""

    dtype: torch.dtype
    autocast: torch.dtype | None

    @property
    def eps(self) -> float:
        return torch.finfo(self.autocast or self.dtype).eps


@dataclasses.dataclass
class Judge:
    """Runs the unpatched model once per dtype and compares candidates with it."""

    model: nn.Module
    inputs: ExampleInputs
    seed: int
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tried = str(self.inputs)
        # rounded to bfloat16, which every dtype here can hold: their rounding is no error of a model
        self.inputs = self.inputs.map(
            lambda t: t.to(torch.bfloat16).double() if t.is_floating_point() else t
        )
        exact = self.copy_to(torch.float64)
        self.truth = self._run_truth(exact, self.seed)
        self.parameters = {name: p.detach() for name, p in exact.named_parameters()}

    def copy_to(self, dtype: torch.dtype) -> Any:
        return cast_parameters(copy.deepcopy(self.model), dtype).eval()

    def inputs_to(self, dtype: torch.dtype) -> ExampleInputs:
        return self.inputs.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def judge(
        self,
        label: str,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        candidate: Candidate,
        exact_config: PatchConfig | None,
    ) -> RunResult:
        """Compare a candidate in one dtype with the truth.

        Args:
            label: the name of the dtype in the result.
            dtype: of parameters and inputs.
            autocast: the dtype of autocast, or None.
            candidate: makes the model that is judged; called again with ``exact_config`` where the
                first one has approximate gradients.
        """
        arithmetic = _Arithmetic(dtype, autocast)
        own = self._run_unpatched(arithmetic, self.seed)
        model, steps, approximate = candidate(dtype, None)
        found = self._run(model, arithmetic, self.seed)
        outputs = check_outputs(self.truth.outputs, own.outputs, found.outputs, arithmetic.eps)
        draw = self._draw(self.truth, own, found, steps)
        approximate_checks: list[TensorCheck] = []
        if approximate:
            checks = _check_gradients(draw.truth, [draw], arithmetic.eps)
            approximate_checks = [*map(_as_approximate, checks)]
            del model
            model, steps, _ = candidate(dtype, exact_config)
            exact = self._run(model, arithmetic, self.seed)
            draw = self._draw(self.truth, own, exact, steps)
        gradients = self._judge_gradients(draw, model, arithmetic, steps)
        return RunResult(
            label, outputs, tuple(gradients), tuple(approximate_checks),
            own.saved, found.saved, own.weight_copies, found.weight_copies,
        )  # fmt: skip

    def _judge_gradients(
        self, first: _Draw, model: nn.Module, arithmetic: _Arithmetic, steps: Sequence[FoldStep]
    ) -> list[TensorCheck]:
        """Over one draw; what fails there, over `MORE_DRAWS` more."""
        checks = {c.name: c for c in _check_gradients(first.truth, [first], arithmetic.eps)}
        failed = [c.name for c in checks.values() if not c.passed and math.isfinite(c.error)]
        if not failed:
            return [*checks.values()]
        draws = [first]
        for seed in range(self.seed + 1, self.seed + 1 + MORE_DRAWS):
            truth = self._run_truth(self.copy_to(torch.float64), seed)
            own = self._run_unpatched(arithmetic, seed)
            found = self._run(model, arithmetic, seed)
            draws.append(self._draw(truth, own, found, steps).only(failed))
        checks |= {c.name: c for c in _check_gradients(failed, draws, arithmetic.eps)}
        self._note(
            f"judged over {len(draws)} draws of the outputs' gradients, as one was not enough to tell "
            f"rounding from a mistake: {', '.join(collapse_names(failed))}"
        )
        return [*checks.values()]

    def _run(self, model: nn.Module, arithmetic: _Arithmetic, seed: int) -> _Run:
        return _run(model, self.inputs_to(arithmetic.dtype), seed, autocast=arithmetic.autocast)

    def _run_unpatched(self, arithmetic: _Arithmetic, seed: int) -> _Run:
        return self._run(self.copy_to(arithmetic.dtype), arithmetic, seed)

    def _run_truth(self, exact: nn.Module, seed: int) -> _Run:
        try:
            return _run(exact, self.inputs, seed, float64=True)
        except RuntimeError as error:
            # a model may mix its own float32 tensors with float64 ones in one op
            self._note(f"truth keeps the model's own float32 steps: {str(error).splitlines()[0]}")
            return _run(exact, self.inputs, seed)

    def _draw(self, truth: _Run, own: _Run, found: _Run, steps: Sequence[FoldStep]) -> _Draw:
        mapped, unknown = map_gradients(found.gradients, self.parameters, steps)
        lost = [name for name in unknown if name in truth.gradients]
        if lost:
            self._note(
                f"not compared, folded into what is frozen or has no bias: {', '.join(lost)}"
            )
        compared = {name: t for name, t in truth.gradients.items() if name not in lost}
        return _Draw(compared, own.gradients, mapped)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
