"""Dropouts and attention as a GPU saves them, for models on the meta device, planned for another machine.

On fake CPU tensors torch would count what its CPU code saves: a number of the tensor's dtype for each
element of a dropout, and all the probabilities of an attention with dropout. On a GPU a dropout saves a
bool, and fused attention draws its mask again. Attention with grouped queries is fused on a GPU; on a CPU old
torch saves its probabilities.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.tracing.call_arguments import attention_call, dropout_call
from lowmem_patch.tracing.observers import FunctionObserver
from lowmem_patch.tracing.op_roles import Role, function_name, role_of


class GpuDropouts(FunctionObserver):
    """Enter it before any mode that records calls, so that those see the calls as they are."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function_name(func)
        # a deferred tensor draws its own mask
        if role_of(name).has(Role.DROPOUT) and args and _is_plain(args[0]):
            call = dropout_call(args, kwargs)
            if 0 < call.p < 1 and not call.in_place and args[0].numel():
                return torch.native_dropout(args[0], call.p, True)[0]
        if name == "scaled_dot_product_attention":
            given = attention_call(name, args, kwargs)
            # a GPU's fused kernels take no mask with grouped queries
            if kwargs.get("enable_gqa") and given.attn_mask is None and not _fuses_groups():
                return _Grouped.apply(*given[:3])  # type: ignore[no-untyped-call]  # of torch
            return func(**{**given._asdict(), **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Deferred)


@cache
def _fuses_groups() -> bool:
    """Whether torch's CPU code has a fused kernel for attention with grouped queries."""
    with _disable_current_modes():
        query, key = torch.empty(1, 2, 1, 8), torch.empty(1, 1, 1, 8)
        choice: int = torch._fused_sdp_choice(query, key, key, enable_gqa=True)
    return choice != 0


class _Grouped(torch.autograd.Function):
    """The shapes of fused attention, for fake tensors.

    Saves q, k, v, the output and a log-sum-exp of each row.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(batch, heads, length, dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
