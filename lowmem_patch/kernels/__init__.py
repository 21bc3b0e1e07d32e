"""Triton kernels: tensors in, tensors out; same functions and signatures as `lowmem_patch.reference`.

Float16, bfloat16 and float32; arithmetic is float32 and each result is rounded once. No autograd, no
modules, no choice of implementation. Importing this package imports Triton.
"""

from __future__ import annotations

from lowmem_patch.kernels.activations import activate, activate_backward, glu_backward, glu_forward
from lowmem_patch.kernels.affine import affine
from lowmem_patch.kernels.codes import codes_backward, codes_forward
from lowmem_patch.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    scale_in_place,
)
from lowmem_patch.kernels.dropout import drop, pack_bool
from lowmem_patch.kernels.eight_bit import from_eight_bits, to_eight_bits
from lowmem_patch.kernels.linear import adapter_weights
from lowmem_patch.kernels.norms import norm_forward, norm_forward_in_eight_bits
from lowmem_patch.kernels.norms_backward import norm_backward
from lowmem_patch.kernels.rotary import rotate

__all__ = [
    "activate",
    "activate_backward",
    "adapter_weights",
    "affine",
    "codes_backward",
    "codes_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "drop",
    "from_eight_bits",
    "glu_backward",
    "glu_forward",
    "norm_backward",
    "norm_forward",
    "norm_forward_in_eight_bits",
    "pack_bool",
    "rotate",
    "scale_in_place",
    "to_eight_bits",
]
