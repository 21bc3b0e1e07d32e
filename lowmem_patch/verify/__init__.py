"""Prove a patched or converted model against float64.

The unpatched model in float64 is the truth, and the unpatched model in dtype D shows the error of D
alone. The candidate in D may make at most ``FORWARD_FACTOR`` times that error in its outputs and
``GRADIENT_FACTOR`` times in its gradients. Errors are relative L2 norms per tensor. Gradients of codes are
compared with those of an unpatched model whose activations have the step tables' derivatives; 8 bits may add
``EIGHT_BIT_ERROR``.
"""

from lowmem_patch.checkpoint.compare import BAND as BAND
from lowmem_patch.checkpoint.compare import FORWARD_FACTOR as FORWARD_FACTOR
from lowmem_patch.checkpoint.compare import TensorCheck as TensorCheck
from lowmem_patch.verify.api import verify_checkpoints as verify_checkpoints
from lowmem_patch.verify.api import verify_model as verify_model
from lowmem_patch.verify.judge import EIGHT_BIT_ERROR as EIGHT_BIT_ERROR
from lowmem_patch.verify.judge import GRADIENT_FACTOR as GRADIENT_FACTOR
from lowmem_patch.verify.result import RunResult as RunResult
from lowmem_patch.verify.result import VerifyResult as VerifyResult
from lowmem_patch.verify.result import worst_check as worst_check
from lowmem_patch.verify.unfolded import map_gradients as map_gradients
