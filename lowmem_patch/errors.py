"""The errors that lowmem-patch raises; `LowmemPatchError` is the base of all others."""

from __future__ import annotations

__all__ = [
    "BudgetError", "CheckpointError", "ConfigError", "DoubleBackwardError", "FitError", "HostMemoryError",
    "LowmemPatchError", "NothingToPatchError", "PatchError", "TraceError", "UnfoldedWeightsError",
    "VariantError",
]  # fmt: skip


class LowmemPatchError(Exception):
    """Base of this package's own errors; the text names the thing and the mend."""


class ConfigError(LowmemPatchError, ValueError):
    """A preset, YAML file, key or value that does not exist."""


class TraceError(LowmemPatchError, RuntimeError):
    """The model could not be run on example inputs, so nothing is known about its dataflow."""


class NothingToPatchError(LowmemPatchError, RuntimeError):
    """``strict=True`` and the plan leaves every site alone."""


class PatchError(LowmemPatchError, RuntimeError):
    """A patch could not be applied, checked or undone; the model was put back as it was."""


class UnfoldedWeightsError(LowmemPatchError, RuntimeError):
    """Weights whose norms are not identities were loaded into a folded model."""


class FitError(LowmemPatchError, ValueError):
    """No step table can be fitted to a function: it is no activation, or grows in a way that none follows."""


class VariantError(LowmemPatchError, RuntimeError):
    """A variant of a benchmark that has no sense for this model, or is not installed."""


class CheckpointError(LowmemPatchError, RuntimeError):
    """A model or checkpoint that cannot be found, read or written."""


class DoubleBackwardError(LowmemPatchError, RuntimeError):
    """A second derivative was asked of an op that keeps too little to give one."""


class HostMemoryError(LowmemPatchError, RuntimeError):
    """The host has no memory for what shall wait there for backward."""


class BudgetError(LowmemPatchError, RuntimeError):
    """No choice of blocks to run again makes the training step fit in the budget; the text names the least
    budget, and what would help.

    Attributes:
        least: bytes of the least budget, where it is known.
    """

    def __init__(self, text: str, least: int | None = None) -> None:
        super().__init__(text, least)
        self.least = least

    def __str__(self) -> str:
        return str(self.args[0])
