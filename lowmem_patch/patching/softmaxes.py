"""Which softmaxes are read by matmuls and nothing else, whose low-precision copies can stand for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lowmem_patch.tracing.consumers import find_consumers
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.trace import Call, Trace

__all__ = ["find_softmaxes"]


def find_softmaxes(
    trace: Trace, shadow: nn.Module, calls: Mapping[str, list[Call]]
) -> tuple[str, ...]:
    """Names of the softmax modules whose output is the left operand of matmuls, and nothing else."""
    found = []
    for name, module in shadow.named_modules():
        if type(module) is not nn.Softmax or name not in calls:
            continue
        outputs = [tensor for call in calls[name] for tensor in call.outputs]
        consumers = find_consumers(trace, outputs)
        if consumers and all(
            consumer.op is not None
            and consumer.use != "opaque"
            and consumer.op.role.has(Role.MATMUL)
            and consumer.op.args[0] is consumer.tensor
            for consumer in consumers
        ):
            found.append(name)
    return tuple(found)
