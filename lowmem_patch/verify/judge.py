"""Run the unpatched model and a candidate in one dtype, and compare outputs and gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import without_randomness
from lowmem_patch.tracing.saved_bytes import saved_bytes
from lowmem_patch.verify.result import RunResult
from lowmem_patch.verify.step_derivatives import Codes, with_step_derivatives
from lowmem_patch.verify.unfolded import map_gradients


class Approximations(NamedTuple):
    """Why gradients of a candidate are not exact.

    Attributes:
        codes: sites that keep codes; also those whose table is the activation's own derivative.
        in_eight_bits: what the backward reads is stored in 8 bits.
    """

    codes: Mapping[str, Codes]
    in_eight_bits: bool


# Takes the dtype of the parameters, and a preset in place of the candidate's own (None: its own).
# Returns the model, its folds, and its approximations; None: gradients are exact.
Candidate = Callable[
    [torch.dtype, PatchConfig | None], tuple[Any, Sequence[FoldStep], Approximations | None]
]

GRADIENT_FACTOR = 3.0
# What 8 bits may add to a gradient's error: that of a cosine of 0.99. Three trained models have cosines of at
# least 0.9995, which is an error of 0.03 (benchmarks/eight_bit.py).
EIGHT_BIT_ERROR = math.sqrt(2 * (1 - 0.99))
# Where a gradient sums up terms that cancel, its error is that of a few roundings, in both models: one draw
# of the outputs' gradients does not tell rounding from a mistake. What fails is judged over so many more.
MORE_DRAWS = 4


@dataclasses.dataclass
class _Run:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    saved: int
    weight_copies: int


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
    detached = {name: t.detach().double() for name, t in outputs.items()}
    run = _Run(detached, {}, saved.activations, saved.weight_copies)
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
    measured against the model's mean gradient. Errors and sizes are summed over ``draws``, of which the first
    has all gradients.
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


def _check_beside(
    names: Iterable[str], several: Sequence[Sequence[_Draw]], eps: float, extra: float
) -> dict[str, TensorCheck]:
    """Each gradient by the reference whose own error allows most, and by ``extra``."""
    names = list(names)
    beside = (_check_gradients(names, draws, eps) for draws in several)
    checks = {}
    for same in zip(*beside, strict=True):
        most = max(same, key=lambda check: check.limit)
        limit = most.limit + extra
        checks[most.name] = dataclasses.replace(most, limit=limit, passed=most.error <= limit)
    return checks


class _Arithmetic(NamedTuple):
    """The dtype of parameters and inputs, and that of autocast or None."""

    dtype: torch.dtype
    autocast: torch.dtype | None

    @property
    def eps(self) -> float:
        return torch.finfo(self.autocast or self.dtype).eps


class _Subject(NamedTuple):
    """What is judged in one arithmetic: a candidate's model and its folds."""

    model: nn.Module
    steps: Sequence[FoldStep]
    arithmetic: _Arithmetic


# Makes a model that is not patched, in this dtype: with it a subject is compared.
_Reference = Callable[[torch.dtype], Any]


@dataclasses.dataclass
class Judge:
    """Runs the unpatched model once per dtype and compares candidates with it."""

    model: nn.Module
    inputs: ExampleInputs
    seed: int
    notes: list[str] = dataclasses.field(default_factory=list)
    # those in which the model does not run with masks and tables in float32
    _casts_buffers: set[torch.dtype] = dataclasses.field(default_factory=set)

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
        return self.cast(self.model, dtype)

    def cast(self, model: nn.Module, dtype: torch.dtype) -> Any:
        """A copy of a model in ``dtype``."""
        everything = dtype in self._casts_buffers
        found = cast_parameters(copy.deepcopy(model), dtype, all_buffers=everything)
        return without_randomness(found)

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
        own = self._run_unpatched(arithmetic)
        model, steps, why = candidate(dtype, None)
        subject = _Subject(model, steps, arithmetic)
        found = self._run(model, arithmetic, self.seed)
        outputs = check_outputs(self.truth.outputs, own.outputs, found.outputs, arithmetic.eps)
        draw = self._draw(self.truth, own, found, steps)
        approximate: list[TensorCheck] = []
        if why is not None:
            shift = max(check.unpatched_error for check in outputs) + arithmetic.eps
            approximate = self._judge_approximate(draw, found, subject, why, shift)
            del model, subject
            subject = _Subject(*candidate(dtype, exact_config)[:2], arithmetic)
            exact = self._run(subject.model, arithmetic, self.seed)
            draw = self._draw(self.truth, own, exact, subject.steps)
        gradients = self._judge_gradients([draw], subject, [self.copy_to])
        return RunResult(
            label, outputs, tuple(gradients), tuple(approximate),
            own.saved, found.saved, own.weight_copies, found.weight_copies,
        )  # fmt: skip

    def _judge_approximate(
        self, exact: _Draw, found: _Run, subject: _Subject, why: Approximations, shift: float
    ) -> list[TensorCheck]:
        """Gradients beside those of a model with the step tables' derivatives; cosines to the exact ones.

        Args:
            exact: beside the unpatched model.
            found: of the subject.
            why: they are approximate.
            shift: how far rounding moves the input of an activation, whose derivative may then be that of the
                next step: errors of models whose steps lie by so much elsewhere are allowed as well.
        """
        references: list[_Reference] = [self.copy_to]
        draws = [exact]
        if why.codes:
            references = [partial(self._stepped, why.codes, by) for by in (0.0, shift, -shift)]
            draws = self._draws(found, subject, references, self.seed)
        extra = EIGHT_BIT_ERROR if why.in_eight_bits else 0.0
        checks = self._judge_gradients(draws, subject, references, extra)
        to_exact = _check_gradients(exact.truth, [exact], subject.arithmetic.eps)
        directions = {check.name: (check.cosine, check.has_direction) for check in to_exact}
        for place, check in enumerate(checks):
            cosine, known = directions[check.name]
            checks[place] = dataclasses.replace(check, cosine=cosine, has_direction=known)
        return checks

    def _stepped(self, codes: Mapping[str, Codes], shift: float, dtype: torch.dtype) -> Any:
        return with_step_derivatives(self.copy_to(dtype), codes, shift)

    def _judge_gradients(
        self,
        draws: Sequence[_Draw],
        subject: _Subject,
        references: Sequence[_Reference],
        extra: float = 0.0,
    ) -> list[TensorCheck]:
        """Over one draw; what fails there, over `MORE_DRAWS` more. ``draws``: one beside each reference, all
        of the first one's truth; ``extra``: error that is allowed on top."""
        eps, several = subject.arithmetic.eps, [[draw] for draw in draws]
        checks = _check_beside(draws[0].truth, several, eps, extra)
        failed = [c.name for c in checks.values() if not c.passed and math.isfinite(c.error)]
        if not failed:
            return [*checks.values()]
        for seed in range(self.seed + 1, self.seed + 1 + MORE_DRAWS):
            found = self._run(subject.model, subject.arithmetic, seed)
            more = self._draws(found, subject, references, seed)
            for those, draw in zip(several, more, strict=True):
                those.append(draw.only(failed))
        checks |= _check_beside(failed, several, eps, extra)
        self._note(
            f"judged over {1 + MORE_DRAWS} draws of the outputs' gradients, as one was not enough to tell "
            f"rounding from a mistake: {', '.join(collapse_names(failed))}"
        )
        return [*checks.values()]

    def _draws(
        self, found: _Run, subject: _Subject, references: Sequence[_Reference], seed: int
    ) -> list[_Draw]:
        """What was ``found`` of a subject beside each reference; the truth is that of the first."""
        truth = self._run_truth(references[0](torch.float64), seed)
        arithmetic = subject.arithmetic
        runs = (self._run(make(arithmetic.dtype), arithmetic, seed) for make in references)
        return [self._draw(truth, own, found, subject.steps) for own in runs]

    def _run_unpatched(self, arithmetic: _Arithmetic) -> _Run:
        dtype = arithmetic.dtype
        try:
            return self._run(self.copy_to(dtype), arithmetic, self.seed)
        except RuntimeError as error:
            if dtype in self._casts_buffers or dtype == torch.float32:
                raise
            self._casts_buffers.add(dtype)
            self._note(
                f"in {str(dtype).removeprefix('torch.')} with all buffers, since the unpatched model does "
                f"not run with those in float32 that no checkpoint holds: {str(error).splitlines()[0]}"
            )
            return self._run(self.copy_to(dtype), arithmetic, self.seed)

    def _run(self, model: nn.Module, arithmetic: _Arithmetic, seed: int) -> _Run:
        return _run(model, self.inputs_to(arithmetic.dtype), seed, autocast=arithmetic.autocast)

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
