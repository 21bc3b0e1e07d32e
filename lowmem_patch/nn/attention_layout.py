"""Fused attention gets queries whose memory holds the heads behind the tokens.

Its kernels give their output in the memory order of q. The Linear behind attention reads the output with
the heads of a token side by side. Where q holds the heads in front of the tokens, that is another order: the
output is copied for the Linear, which saves the copy beside the output that attention saves. Here q is
copied into the Linear's order instead. The values are the same, and autograd saves one tensor less. Where a
kernel does not follow q, the copy of q is of no use, and nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.modes import ForwardMode, run_under


def give_heads_last(module: nn.Module) -> None:
    """Let the queries of a module's fused attention, and so its output, lie in memory as ``[B, S, H, D]``."""
    run_under(module, _AroundAttention)


def has_heads_first(tensor: Tensor) -> bool:
    """Whether ``[B, H, S, D]`` lies in memory with the tokens of a head side by side."""
    if tensor.dim() != 4 or tensor.shape[1] == 1 or tensor.shape[2] == 1:
        return False
    return tensor.stride(1) > tensor.stride(2)


class _AroundAttention(ForwardMode):
    """Hands fused attention its queries with the heads last."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # at once for all other functions, of which a module may call a hundred
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not any(map(_trains, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if args:
            return func(_with_heads_last(args[0]), *args[1:], **kwargs)
        return func(**{**kwargs, "query": _with_heads_last(kwargs.get("query"))})


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _with_heads_last(q: Any) -> Any:
    if is_foreign(q) or q.layout is not torch.strided or q.is_nested or not has_heads_first(q):
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)
