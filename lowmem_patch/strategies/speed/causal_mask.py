"""causal mask: compiled attention gets no mask where eager attention gets none. Saves what repeated keys
and values take, and the time of a kernel that reads a mask."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.causal_mask import drop_causal_mask
from lowmem_patch.strategies.protocol import Change, Facts, Found, hook_before
from lowmem_patch.tracing.call_arguments import attention_call
from lowmem_patch.tracing.op_roles import Role


def find(facts: Facts, config: PatchConfig) -> Found:
    """The modules among those that ran whose forward calls transformers' attention functions."""
    if config.attention != "fused":
        return Found()
    patches = [
        Change(name, "causal mask", hook_before, (drop_causal_mask,))
        for name in facts.calls
        if _calls_sdpa(facts.modules[name]) and _passes_mask_on(facts, name)
    ]
    text = "attention that, if compiled, takes is_causal in place of a mask, for speed"
    return Found().take(patches, text)


def _calls_sdpa(module: nn.Module) -> bool:
    """Whether a forward hands its mask to the attention functions that a config of transformers names."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or _TABLE not in code.co_names or "attention_mask" not in code.co_varnames:
        return False
    sdpa = forward.__globals__.get(_TABLE, {}).get("sdpa")
    return getattr(sdpa, "__module__", None) == "transformers.integrations.sdpa_attention"


def _passes_mask_on(facts: Facts, name: str) -> bool:
    """Whether attention got the module's mask as it is, or none: a module that makes another one of it (Doge)
    needs it, where it is the causal one, too."""
    for call in facts.calls[name]:
        ops = facts.trace.ops[call.first_op : call.last_op]
        made = {id(tensor) for op in ops for tensor in op.outputs}
        masks = [
            attention_call(op.name, op.args, op.kwargs).attn_mask
            for op in ops
            if op.role.has(Role.FUSED_ATTENTION)
        ]
        given = {id(mask) for mask in masks if mask is not None}
        read = {
            id(argument)
            for op in ops
            if not op.role.has(Role.FUSED_ATTENTION)
            for argument in (*op.args, *op.kwargs.values())
            if isinstance(argument, Tensor)
        }
        if not masks or given & (made | read):
            return False
    return True


_TABLE = "ALL_ATTENTION_FUNCTIONS"
