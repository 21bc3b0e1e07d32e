"""Which modules give q, k and v in one tensor (packed qkv), whose gradient torch would permute twice."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lowmem_patch.nn.joint import VIEWS
from lowmem_patch.tracing.consumers import called_with
from lowmem_patch.tracing.dataflow import forward, only_consumer
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Call, Op, Trace

__all__ = ["find_packed_qkv"]


def find_packed_qkv(trace: Trace, calls: Mapping[str, list[Call]]) -> tuple[str, ...]:
    """Names of the modules whose output is viewed, permuted and unbound, and nothing else.

    Of modules that return one and the same tensor it is the outermost: a LoRA layer, and not its base.
    """
    found = {
        tuple(id(call.outputs[0]) for call in made): name
        for name, made in calls.items()
        if name
        and all(len(call.outputs) == 1 and _is_unbound(trace, call.outputs[0]) for call in made)
    }
    return tuple(found.values())


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
    return permuted and not called_with(trace, set(map(id, views)), ())
