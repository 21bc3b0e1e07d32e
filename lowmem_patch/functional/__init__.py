"""The ops: checked, dispatched to an implementation, differentiable; what is saved is decided here.

Importing this needs no Triton: the kernels are imported at their first use.
"""

from __future__ import annotations

from lowmem_patch.constants import ActivationKind, NormSettings
from lowmem_patch.functional._implementation import Implementation
from lowmem_patch.functional._library import (
    first_order,
    in_compiler,
    is_exporting,
    is_transformed,
    register_plain,
    without_autocast,
)
from lowmem_patch.functional._ownership import is_checkpoint_packing
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
from lowmem_patch.functional.codes import codes_activation
from lowmem_patch.functional.cross_entropy import linear_cross_entropy, linear_losses
from lowmem_patch.functional.dropout import draw_dropout, dropout_linear, packed_dropout
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES, from_eight_bits, to_eight_bits
from lowmem_patch.functional.head import Head, flat, in_compute_dtype, logits_in_chunks
from lowmem_patch.functional.labels import Labels
from lowmem_patch.functional.linear import activation_linear, recast_linear
from lowmem_patch.functional.matmul import recast_matmul
from lowmem_patch.functional.norms import ms_norm, save_copy
from lowmem_patch.functional.packing import pack_bool
from lowmem_patch.functional.placeholder import is_written, placeholder
from lowmem_patch.functional.products import LowRank
from lowmem_patch.functional.recomputed import GroupedMatmul, recomputed_linear
from lowmem_patch.functional.rotary import rotary_embedding
from lowmem_patch.functional.sharded import is_sharded
from lowmem_patch.functional.unbind import unbind_permuted

__all__ = [
    "EIGHT_BIT_DTYPES",
    "ActivationKind",
    "Affine",
    "GroupedMatmul",
    "Head",
    "Implementation",
    "Labels",
    "LowRank",
    "NormSettings",
    "Recomputed",
    "activation",
    "activation_gradients",
    "activation_linear",
    "affine_linear",
    "codes_activation",
    "computed_again",
    "draw_dropout",
    "dropout_linear",
    "first_order",
    "flat",
    "from_eight_bits",
    "glu",
    "in_compiler",
    "in_compute_dtype",
    "is_checkpoint_packing",
    "is_exporting",
    "is_sharded",
    "is_transformed",
    "is_written",
    "linear_cross_entropy",
    "linear_losses",
    "logits_in_chunks",
    "ms_norm",
    "pack_bool",
    "packed_dropout",
    "packs_saved_tensors",
    "placeholder",
    "recast_linear",
    "recast_matmul",
    "recomputed_linear",
    "register_plain",
    "rotary_embedding",
    "save_copy",
    "to_eight_bits",
    "unbind_permuted",
    "without_autocast",
]
