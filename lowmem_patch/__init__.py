"""lowmem-patch: patch a model in one line, so that autograd keeps only what the backward must have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowmem_patch.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DoubleBackwardError,
    FitError,
    HostMemoryError,
    LowmemPatchError,
    NothingToPatchError,
    PatchError,
    TraceError,
    UnfoldedWeightsError,
    VariantError,
)

if TYPE_CHECKING:
    from lowmem_patch.api import patch_model, patch_report, plan_patch, unpatch_model
    from lowmem_patch.config import PatchConfig
    from lowmem_patch.planning.report import PatchReport
    from lowmem_patch.tables import fit_step_table
    from lowmem_patch.tracing.saved_bytes import saved_bytes
    from lowmem_patch.verify import verify_model

__all__ = [
    "BudgetError", "CheckpointError", "ConfigError", "DoubleBackwardError", "FitError", "HostMemoryError",
    "LowmemPatchError", "NothingToPatchError", "PatchConfig", "PatchError", "PatchReport", "TraceError",
    "UnfoldedWeightsError", "VariantError", "__version__", "fit_step_table", "patch_model", "patch_report",
    "plan_patch", "saved_bytes", "unpatch_model", "verify_model",
]  # fmt: skip
__version__ = "0.1.0"

# Imported when they are first asked for: torch takes seconds, for which `lowmem-patch --help` shall not wait.
_HOMES = {
    "PatchConfig": "config",
    "PatchReport": "planning.report",
    "fit_step_table": "tables",
    "patch_model": "api",
    "patch_report": "api",
    "plan_patch": "api",
    "saved_bytes": "tracing.saved_bytes",
    "unpatch_model": "api",
    "verify_model": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
