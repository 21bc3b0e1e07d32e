"""Which softmaxes a matmul alone reads: under autocast it keeps a narrow copy of what they keep wide."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lowmem_patch.patching.readers import find_readers
from lowmem_patch.patching.trace import Call, Trace

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
        readers = find_readers(trace, outputs, shadow)
        if readers and all(
            reader.op is not None
            and reader.kind != "opaque"
            and reader.op.name in ("matmul", "__matmul__")
            and reader.op.args[0] is reader.tensor
            for reader in readers
        ):
            found.append(name)
    return tuple(found)
