"""The ops: checked, dispatched to an implementation, differentiable; what is saved is decided here.

Importing this needs no Triton: the kernels are imported at their first use.
"""

from __future__ import annotations

from lowmem_patch.constants import ActivationKind
from lowmem_patch.functional._implementation import Implementation
from lowmem_patch.functional._library import (
    first_order,
    is_exporting,
    is_transformed,
    register_plain,
)
from lowmem_patch.functional.activations import (
    activation,
    activation_gradients,
    computed_again,
    glu,
)
from lowmem_patch.functional.affine import (
    Affine,
    Recomputed,
    affine_linear,
    packs_saved_tensors,
)
from lowmem_patch.functional.codes import codes_activation, regelu2, requickgelu2, resilu2
from lowmem_patch.functional.dropout import draw_dropout, dropout_linear, packed_dropout
from lowmem_patch.functional.grouped import activation_grouped_matmul
from lowmem_patch.functional.linear import LowRank, activation_linear, kept_linear
from lowmem_patch.functional.matmul import kept_matmul
from lowmem_patch.functional.norm_pair import ms_norm_pair
from lowmem_patch.functional.norms import ms_layer_norm, ms_rms_norm, norm_and_z, save_copy
from lowmem_patch.functional.packing import pack_bool, unpack_bool
from lowmem_patch.functional.rotary import rotary_embedding
from lowmem_patch.functional.sharded import is_sharded
from lowmem_patch.functional.unbind import unbind_permuted

__all__ = [
    "ActivationKind",
    "Affine",
    "Implementation",
    "LowRank",
    "Recomputed",
    "activation",
    "activation_gradients",
    "activation_grouped_matmul",
    "activation_linear",
    "affine_linear",
    "codes_activation",
    "computed_again",
    "draw_dropout",
    "dropout_linear",
    "first_order",
    "glu",
    "is_exporting",
    "is_sharded",
    "is_transformed",
    "kept_linear",
    "kept_matmul",
    "ms_layer_norm",
    "ms_norm_pair",
    "ms_rms_norm",
    "norm_and_z",
    "pack_bool",
    "packed_dropout",
    "packs_saved_tensors",
    "regelu2",
    "register_plain",
    "requickgelu2",
    "resilu2",
    "rotary_embedding",
    "save_copy",
    "unbind_permuted",
    "unpack_bool",
]
