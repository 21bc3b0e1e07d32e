"""The ops: checked, dispatched to an implementation, differentiable; what is saved is decided here.

Importing this needs no Triton: the kernels are imported at their first use.
"""

from __future__ import annotations

from lowmem_patch.constants import ActivationKind as ActivationKind
from lowmem_patch.constants import NormSettings as NormSettings
from lowmem_patch.constants import wide as wide
from lowmem_patch.functional._library import backward_number as backward_number
from lowmem_patch.functional._library import below_modes as below_modes
from lowmem_patch.functional._library import compilers_output as compilers_output
from lowmem_patch.functional._library import direct_call as direct_call
from lowmem_patch.functional._library import first_order as first_order
from lowmem_patch.functional._library import in_compiler as in_compiler
from lowmem_patch.functional._library import is_eager as is_eager
from lowmem_patch.functional._library import is_exporting as is_exporting
from lowmem_patch.functional._library import is_ordinary as is_ordinary
from lowmem_patch.functional._library import is_transformed as is_transformed
from lowmem_patch.functional._library import refuse_second_order as refuse_second_order
from lowmem_patch.functional._library import register_known as register_known
from lowmem_patch.functional._library import register_plain as register_plain
from lowmem_patch.functional._library import saved_tensors as saved_tensors
from lowmem_patch.functional._library import see_undefined as see_undefined
from lowmem_patch.functional._library import without_autocast as without_autocast
from lowmem_patch.functional._library import without_dispatch_modes as without_dispatch_modes
from lowmem_patch.functional._library import without_grad as without_grad
from lowmem_patch.functional._library import without_torch_function as without_torch_function
from lowmem_patch.functional._ownership import TorchCheckpointFrame as TorchCheckpointFrame
from lowmem_patch.functional._ownership import as_it_is as as_it_is
from lowmem_patch.functional._ownership import checkpointed_block as checkpointed_block
from lowmem_patch.functional._ownership import is_checkpoint_packing as is_checkpoint_packing
from lowmem_patch.functional._ownership import is_in_other_block as is_in_other_block
from lowmem_patch.functional._ownership import may_pack as may_pack
from lowmem_patch.functional._ownership import packer as packer
from lowmem_patch.functional._ownership import packs_saved_tensors as packs_saved_tensors
from lowmem_patch.functional._ownership import unwritten as unwritten
from lowmem_patch.functional.activations import activation as activation
from lowmem_patch.functional.activations import activation_gradients as activation_gradients
from lowmem_patch.functional.activations import codes_activation as codes_activation
from lowmem_patch.functional.activations import computed_again as computed_again
from lowmem_patch.functional.activations import (
    differentiable_activation as differentiable_activation,
)
from lowmem_patch.functional.activations import saves_input as saves_input
from lowmem_patch.functional.affine import Affine as Affine
from lowmem_patch.functional.affine import Recomputed as Recomputed
from lowmem_patch.functional.affine import affine_linear as affine_linear
from lowmem_patch.functional.channel_norms import ChannelNorm as ChannelNorm
from lowmem_patch.functional.channel_norms import channel_statistics as channel_statistics
from lowmem_patch.functional.compiled import SavedAs as SavedAs
from lowmem_patch.functional.compiled import is_sharded as is_sharded
from lowmem_patch.functional.compiled import is_written as is_written
from lowmem_patch.functional.compiled import limits_of as limits_of
from lowmem_patch.functional.compiled import placeholder as placeholder
from lowmem_patch.functional.cross_entropy import linear_cross_entropy as linear_cross_entropy
from lowmem_patch.functional.cross_entropy import linear_losses as linear_losses
from lowmem_patch.functional.dropout import dropout_linear as dropout_linear
from lowmem_patch.functional.dropout import packed_dropout as packed_dropout
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES as EIGHT_BIT_DTYPES
from lowmem_patch.functional.eight_bit import Memory as Memory
from lowmem_patch.functional.eight_bit import from_eight_bits as from_eight_bits
from lowmem_patch.functional.eight_bit import memory_in_eight_bits as memory_in_eight_bits
from lowmem_patch.functional.eight_bit import stored_linear as stored_linear
from lowmem_patch.functional.eight_bit import stores_directly as stores_directly
from lowmem_patch.functional.eight_bit import to_eight_bits as to_eight_bits
from lowmem_patch.functional.graph_storage import stored_attention as stored_attention
from lowmem_patch.functional.head import Head as Head
from lowmem_patch.functional.head import Labels as Labels
from lowmem_patch.functional.head import flat as flat
from lowmem_patch.functional.head import in_compute_dtype as in_compute_dtype
from lowmem_patch.functional.head import logits_in_chunks as logits_in_chunks
from lowmem_patch.functional.linear import activation_linear as activation_linear
from lowmem_patch.functional.linear import recast_linear as recast_linear
from lowmem_patch.functional.linear import recast_matmul as recast_matmul
from lowmem_patch.functional.norms import ms_norm as ms_norm
from lowmem_patch.functional.norms import save_copy as save_copy
from lowmem_patch.functional.products import LowRank as LowRank
from lowmem_patch.functional.products import PackedWeight as PackedWeight
from lowmem_patch.functional.recomputed import ExpertWeight as ExpertWeight
from lowmem_patch.functional.recomputed import RecomputedMatmul as RecomputedMatmul
from lowmem_patch.functional.recomputed import RowBias as RowBias
from lowmem_patch.functional.recomputed import matrix_product as matrix_product
from lowmem_patch.functional.recomputed import recomputed_linear as recomputed_linear
from lowmem_patch.functional.rotary import turned as turned
from lowmem_patch.functional.rotary import turned_back as turned_back
from lowmem_patch.functional.row_moves import gather as gather
from lowmem_patch.functional.row_moves import unbind_permuted as unbind_permuted
from lowmem_patch.functional.scaled_linear import scaled_linear as scaled_linear
from lowmem_patch.functional.scaled_linear import scaled_scores as scaled_scores
from lowmem_patch.functional.shared_input import SharedInput as SharedInput
from lowmem_patch.functional.shared_input import is_worth_python as is_worth_python
