"""lowmem-patch: patch a model in one line, so that autograd keeps only what the backward must have."""

from lowmem_patch.api import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.config import PatchConfig
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.tables import fit_step_table
from lowmem_patch.tracing.saved_bytes import saved_bytes
from lowmem_patch.verify import verify_model

__all__ = [
    "PatchConfig",
    "PatchReport",
    "__version__",
    "fit_step_table",
    "patch_model",
    "patch_report",
    "plan_patch",
    "saved_bytes",
    "unpatch_model",
    "verify_model",
]
__version__ = "0.1.0"
