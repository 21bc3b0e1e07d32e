"""Prove a patched or converted model against float64.

The unpatched model in float64 is the truth, and the unpatched model in dtype D shows the error of D
alone. The candidate in D may make at most ``FORWARD_FACTOR`` times that error in its outputs and
``GRADIENT_FACTOR`` times in its gradients. Errors are relative L2 norms per tensor.
"""

from lowmem_patch.checkpoint.compare import BAND, FORWARD_FACTOR, TensorCheck
from lowmem_patch.verify.api import Progress, verify_checkpoints, verify_model
from lowmem_patch.verify.judge import GRADIENT_FACTOR, map_gradients
from lowmem_patch.verify.result import RunResult, VerifyResult, worst_check

__all__ = [
    "BAND",
    "FORWARD_FACTOR",
    "GRADIENT_FACTOR",
    "Progress",
    "RunResult",
    "TensorCheck",
    "VerifyResult",
    "map_gradients",
    "verify_checkpoints",
    "verify_model",
    "worst_check",
]
