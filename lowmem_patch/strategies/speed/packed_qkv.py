"""packed qkv: where one Linear gives q, k and v, their gradients are joined in one pass, which torch would
permute twice. Saves no byte."""

from __future__ import annotations

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.packed_qkv import VIEWS, follow_packed
from lowmem_patch.strategies.protocol import Change, Facts, Found, hook_behind
from lowmem_patch.tracing.dataflow import forward, only_consumer
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op, Trace


def find(facts: Facts, config: PatchConfig) -> Found:
    """Modules whose output is viewed, permuted and unbound, and nothing else.

    Of modules that return one and the same tensor it is the outermost: a LoRA layer, and not its base.
    """
    if config.attention != "fused":
        return Found()
    names = {
        tuple(id(call.outputs[0]) for call in made): name
        for name, made in facts.calls.items()
        if name
        and all(
            len(call.outputs) == 1 and _is_unbound(facts.trace, call.outputs[0]) for call in made
        )
    }
    patches = [Change(name, "packed_qkv", hook_behind, (follow_packed,)) for name in names.values()]
    return Found().take(patches, "gradients of q, k, v that are joined in one pass, for speed")


def _is_unbound(trace: Trace, output: Tensor) -> bool:
    """Whether ``output`` is unbound behind views that permute it, and read by nobody else."""
    if not output.is_contiguous() or not output.requires_grad:
        return False

    def is_view(op: Op, tensor: Tensor) -> bool:
        if only_consumer(trace, tensor) is not op or op.name not in VIEWS:
            return False
        return storage_key(op.outputs[0]) == storage_key(output)

    views = [path.end for path in forward(trace, [output], is_view)]
    last = only_consumer(trace, views[-1])
    # where the order stays, torch itself makes one pass
    permuted = last is not None and last.role.has(Role.UNBIND) and not views[-1].is_contiguous()
    followed = set(map(id, views))
    return permuted and all(followed.isdisjoint(map(id, call.inputs)) for call in trace.calls)
