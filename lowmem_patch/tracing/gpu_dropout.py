"""Dropouts as a GPU saves them, for models on the meta device: those are planned for another machine.

On fake CPU tensors torch would count what its CPU code saves: a number of the tensor's dtype for each
element of a dropout, and all the probabilities of an attention with dropout. On a GPU a dropout saves a
bool, and fused attention draws its mask again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.tracing.call_arguments import dropout_call
from lowmem_patch.tracing.observers import FunctionObserver
from lowmem_patch.tracing.op_roles import Role, function_name, role_of

# arguments of scaled_dot_product_attention that may be given by position
_BEHIND_THE_MASK = ("dropout_p", "is_causal")


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
            named = dict(zip(_BEHIND_THE_MASK, args[4:], strict=False))
            return func(*args[:4], **{**named, **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Deferred)
