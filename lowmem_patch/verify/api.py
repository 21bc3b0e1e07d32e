"""The public calls: a model against itself patched, a checkpoint against its conversion."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowmem_patch.api import earlier_config, patch_model, patch_report, unpatch_model
from lowmem_patch.config import ConfigLike, PatchConfig, given_config, load_config
from lowmem_patch.errors import CheckpointError, LowmemPatchError, TraceError
from lowmem_patch.planning.report import PatchReport, find_records
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.tracing.base_model import checked_model, has_dropouts
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import as_example_inputs
from lowmem_patch.verify.judge import Approximations, Candidate, Judge, seeded
from lowmem_patch.verify.result import RunResult, VerifyResult
from lowmem_patch.verify.step_derivatives import Codes

_NO_DROPOUT = (
    "dropout is off here: saved bytes are without it, and plan_patch counts those of training"
)

Progress = Callable[[str, int, int], None]


def _judged(
    original: nn.Module,
    given: Any,
    dtypes: Sequence[torch.dtype],
    autocast: torch.dtype | None,
    seed: int,
    progress: Progress | None,
) -> tuple[Judge, Callable[[Candidate, PatchConfig | None], Iterator[RunResult]]]:
    """Who judges, and what gives the results of a candidate, one for each arithmetic that is tried."""
    if given is None:
        with seeded(original, seed):
            given = make_example_inputs(original)
    inputs = as_example_inputs(given)
    modes: list[tuple[str, torch.dtype, torch.dtype | None]]
    modes = [(_name(dtype), dtype, None) for dtype in dtypes]
    if autocast is not None:
        modes.append((f"autocast {_name(autocast)}", torch.float32, autocast))
    tell = progress or (lambda *_: None)
    tell("truth in float64", 0, len(modes))
    judge = Judge(original, inputs, seed)

    def runs(candidate: Candidate, exact: PatchConfig | None) -> Iterator[RunResult]:
        for index, (label, dtype, low) in enumerate(modes):
            tell(label, index, len(modes))
            yield judge.judge(label, dtype, low, candidate, exact)
        tell("done", len(modes), len(modes))

    return judge, runs


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def verify_model(
    model: nn.Module,
    preset: ConfigLike | None = None,
    *,
    example_inputs: Any = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    autocast: torch.dtype | None = torch.bfloat16,
    seed: int = 0,
    progress: Progress | None = None,
    config: ConfigLike | None = None,
) -> VerifyResult:
    """Compare a model with itself patched; the model is copied, never changed.

    Dropout is off (eval mode, but BatchNorms compute statistics of the batch), gradients are on. Where the
    preset uses approximate derivatives, the norms and everything else are proven on a second copy whose
    activations and storage are exact. The approximate gradients are compared with those of an unpatched
    model whose activations have the derivatives of the step tables; 8 bits may add ``EIGHT_BIT_ERROR``.

    Args:
        preset, config, example_inputs: as in :func:`lowmem_patch.patch_model`.
        dtypes, autocast: each is tried; autocast with float32 parameters, and not where it is None.
        seed: of the inputs that are made, of the gradients of the outputs, and of what the model draws.
        progress: called with the present step's name, the number of steps done, and the number of all.

    Raises:
        ConfigError: ``model`` is no model, or there is no such preset.
        TraceError: no inputs could be made, or the model did not run on them.
    """
    checked_model(model, "verify_model")
    chosen = load_config(given_config(preset, config, earlier_config(model)))
    exact = dataclasses.replace(
        chosen,
        activations="recompute",
        storage="exact",
        name=f"{chosen.name}, exact activations and storage",
    )
    original = unpatch_model(copy.deepcopy(model)) if find_records(model) else model
    judge, runs = _judged(original, example_inputs, dtypes, autocast, seed, progress)
    patched, approximate = 0, dict[str, None]()

    def candidate(dtype: torch.dtype, other: PatchConfig | None) -> Any:
        nonlocal patched
        copied = judge.copy_to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the result says when nothing was patched
            copied = patch_model(copied, other or chosen, example_inputs=judge.inputs_to(dtype))
        report = patch_report(copied)
        patched = max(patched, len(report.patched))
        approximate.update(dict.fromkeys(site.name for site in report.approximate))
        return copied, report.fold_steps, _approximations(report)

    results = tuple(runs(candidate, exact))
    if not patched:
        judge.notes.append("nothing was patched: plan_patch says why for each site")
    judge.notes += [_NO_DROPOUT] if has_dropouts(original) else []
    return VerifyResult(
        type(model).__name__, f"patched with preset {chosen.name}", judge.tried, results, patched,
        tuple(approximate), tuple(judge.notes),
    )  # fmt: skip


def _approximations(report: PatchReport) -> Approximations | None:
    if not report.approximate:
        return None
    codes = {
        site.name: Codes(site.kind, report.config.bits)
        for site in report.sites
        if site.strategy == "codes"
    }
    return Approximations(codes, any(site.strategy == "eight_bit" for site in report.approximate))


def verify_checkpoints(
    original: nn.Module,
    converted: nn.Module,
    fold_steps: Sequence[FoldStep] = (),
    *,
    example_inputs: Any = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    autocast: torch.dtype | None = torch.bfloat16,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyResult:
    """Compare two models that should compute the same function, such as a checkpoint and its conversion.

    Args:
        fold_steps: the folds of the conversion; gradients are mapped back through them.

    Raises:
        CheckpointError: they are models of two classes.
        TraceError: no inputs could be made, or the models return different outputs.
    """
    if type(original).__name__ != type(converted).__name__:
        raise CheckpointError(
            f"the original is a {type(original).__name__} and the other a {type(converted).__name__}: "
            "give two checkpoints of one model"
        )
    judge, runs = _judged(original, example_inputs, dtypes, autocast, seed, progress)

    def candidate(dtype: torch.dtype, _other: PatchConfig | None) -> Any:
        return judge.cast(converted, dtype), fold_steps, None

    try:
        results = tuple(runs(candidate, None))
    except LowmemPatchError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        raise TraceError(
            f"the other {type(converted).__name__} does not run on what the original takes "
            f"({judge.tried}): {error}"
        ) from error
    return VerifyResult(
        type(original).__name__, f"converted checkpoint, {len(fold_steps)} norms folded", judge.tried,
        results, len(fold_steps), (), tuple(judge.notes),
    )  # fmt: skip
