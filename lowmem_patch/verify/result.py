"""The verdict as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lowmem_patch.checkpoint.compare import TensorCheck


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One dtype.

    Attributes:
        dtype: ``float32``, ``bfloat16``, ..., or ``autocast bfloat16`` (parameters in float32).
        outputs: every output tensor.
        gradients: every trainable parameter, with exact derivatives: pass or fail.
        approximate: the same with the approximations of the preset, beside what its step tables and 8 bits
            should give. The cosines are those to the exact gradients. Empty when the preset has none.
        saved_before: activation bytes that autograd holds in the unpatched model, ``saved_after`` in
            the candidate; ``weight_copies_*`` are low-precision copies of weights, reported apart.
    """

    dtype: str
    outputs: tuple[TensorCheck, ...]
    gradients: tuple[TensorCheck, ...]
    approximate: tuple[TensorCheck, ...]
    saved_before: int
    saved_after: int
    weight_copies_before: int
    weight_copies_after: int

    @property
    def checks(self) -> dict[str, tuple[TensorCheck, ...]]:
        """All checks, by ``outputs``, ``gradients`` and ``approximate``."""
        names = ("outputs", "gradients", "approximate")
        return {name: getattr(self, name) for name in names}

    @property
    def passed(self) -> bool:
        return all(check.passed for checks in self.checks.values() for check in checks)


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """The verdict and its checks; plain data, ``str()`` is a readable table."""

    model: str
    candidate: str
    inputs: str
    runs: tuple[RunResult, ...]
    patched_sites: int
    approximate_sites: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.runs) and all(run.passed for run in self.runs)

    @property
    def verdict(self) -> str:
        """The verdict in words, with the least cosine of approximate gradients to the exact ones."""
        if not self.passed:
            return "FAILED"
        checks = [(check, run.dtype) for run in self.runs for check in run.approximate]
        found = [
            (check.cosine, check.name, dtype) for check, dtype in checks if check.has_direction
        ]
        if not found:
            return "passed"
        cosine, name, dtype = min(found)
        least = f"their least cosine to the exact ones is {cosine:.4f} ({name} in {dtype})"
        return f"passed; gradients are approximate, {least}"

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["passed"] = self.passed
        for run, result in zip(data["runs"], self.runs, strict=True):
            run["passed"] = result.passed
        return data

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.candidate}, on {self.inputs}"]
        for run in self.runs:
            for name, checks in run.checks.items():
                worst = worst_check(checks)
                if worst is not None:
                    lines.append(
                        f"{run.dtype:18} {name:11} error {worst.error:.2e} "
                        f"(unpatched {worst.unpatched_error:.2e}, allowed {worst.limit:.2e}, "
                        f"cosine {worst.cosine:.6f}) {worst.name}"
                    )
            lines.append(f"{run.dtype:18} saved bytes {run.saved_before:,} -> {run.saved_after:,}")
        lines.extend(self.notes)
        lines.append(self.verdict)
        return "\n".join(lines)


def worst_check(checks: Sequence[TensorCheck]) -> TensorCheck | None:
    """The check nearest to its limit, or farthest beyond; a failed one first."""

    def badness(check: TensorCheck) -> tuple[bool, float]:
        within = 0 < check.limit < float("inf")  # infinities that differ have the limit 0
        return not check.passed, check.error / (check.limit if within else 1.0)

    return max(checks, key=badness, default=None)
