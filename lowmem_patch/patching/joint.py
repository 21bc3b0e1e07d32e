"""Which modules give q, k and v in one tensor, whose gradient torch would permute twice."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lowmem_patch.nn.joint import VIEWS
from lowmem_patch.patching.readers import called_with
from lowmem_patch.patching.trace import Call, Op, Trace
from lowmem_patch.saved import storage_key

__all__ = ["find_joint"]


def find_joint(trace: Trace, calls: Mapping[str, list[Call]]) -> tuple[str, ...]:
    """Names of the modules whose output is viewed, permuted and unbound, and nothing else.

    Of modules that return one and the same tensor it is the outermost: a LoRA layer, and not its base.
    """
    found = {
        tuple(id(call.outputs[0]) for call in made): name
        for name, made in calls.items()
        if name
        and all(len(call.outputs) == 1 and _is_joint(trace, call.outputs[0]) for call in made)
    }
    return tuple(found.values())


def _is_joint(trace: Trace, output: Tensor) -> bool:
    if not output.is_contiguous() or not output.requires_grad:
        return False
    tensor, seen = output, {id(output)}
    while (op := _only_reader(trace, tensor)) is not None:
        if op.name == "unbind":
            # where the order is kept, torch itself makes one pass
            return not tensor.is_contiguous() and not called_with(trace, seen, ())
        if op.name not in VIEWS or storage_key(op.outputs[0]) != storage_key(output):
            return False
        tensor = op.outputs[0]
        seen.add(id(tensor))
    return False


def _only_reader(trace: Trace, tensor: Tensor) -> Op | None:
    readers = trace.readers.get(id(tensor), ())
    if len(readers) != 1 or id(tensor) in trace.outputs:
        return None
    op = readers[0]
    return op if op.args and op.args[0] is tensor and not op.writes and not op.opaque else None
