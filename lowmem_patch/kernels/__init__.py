"""Triton kernels: tensors in, tensors out; same functions and signatures as `lowmem_patch.reference`.

Float16, bfloat16 and float32; arithmetic is float32 and each result is rounded once. No autograd, no
modules, no choice of implementation. Importing this package imports Triton.
"""

from __future__ import annotations

from lowmem_patch.kernels.activations import activation_backward as activation_backward
from lowmem_patch.kernels.activations import activation_forward as activation_forward
from lowmem_patch.kernels.channel_norms import channel_norm_backward as channel_norm_backward
from lowmem_patch.kernels.channel_norms import channel_norm_forward as channel_norm_forward
from lowmem_patch.kernels.channel_norms import channel_statistics as channel_statistics
from lowmem_patch.kernels.channel_norms import channel_sum_gradient as channel_sum_gradient
from lowmem_patch.kernels.codes import codes_backward as codes_backward
from lowmem_patch.kernels.codes import codes_forward as codes_forward
from lowmem_patch.kernels.cross_entropy import cross_entropy_backward as cross_entropy_backward
from lowmem_patch.kernels.cross_entropy import cross_entropy_forward as cross_entropy_forward
from lowmem_patch.kernels.cross_entropy import scale_in_place as scale_in_place
from lowmem_patch.kernels.dropout import drop as drop
from lowmem_patch.kernels.dropout import pack_bool as pack_bool
from lowmem_patch.kernels.eight_bit import from_eight_bits as from_eight_bits
from lowmem_patch.kernels.eight_bit import to_eight_bits as to_eight_bits
from lowmem_patch.kernels.linear import adapter_weights as adapter_weights
from lowmem_patch.kernels.linear import scaled_gradients as scaled_gradients
from lowmem_patch.kernels.norms import affine as affine
from lowmem_patch.kernels.norms import norm_forward as norm_forward
from lowmem_patch.kernels.norms import norm_forward_in_eight_bits as norm_forward_in_eight_bits
from lowmem_patch.kernels.norms_backward import norm_backward as norm_backward
from lowmem_patch.kernels.rotary import rotate as rotate
