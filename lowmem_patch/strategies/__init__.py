"""The strategies, in the order in which they are asked: one file each, and a line here."""

from __future__ import annotations

from lowmem_patch.strategies import (
    attention_layout,
    chains,
    channel_norms,
    codes,
    cosine_attention,
    dropout_bits,
    eight_bit,
    fold,
    gated_norms,
    head,
    lora,
    one_copy,
    recompute,
    rotary,
    rows,
    scales,
    share,
)
from lowmem_patch.strategies.protocol import Strategy
from lowmem_patch.strategies.speed import causal_mask, packed_qkv

__all__ = ["STRATEGIES"]

STRATEGIES: tuple[Strategy, ...] = (
    rotary,  # gives a module the forward around which others put theirs
    fold,
    channel_norms,  # knows more of norms that are not over the last dimension than the next one
    share,
    gated_norms,
    recompute,
    codes,
    chains,  # takes what the two before it leave
    lora,
    dropout_bits,
    one_copy,
    rows,
    scales,
    cosine_attention,
    head,
    packed_qkv,
    causal_mask,
    attention_layout,
    eight_bit,
)
