"""Which dropouts shall save their mask in bits: modules that drop, and whose gradient is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lowmem_patch.patching.adapters import Adapters
from lowmem_patch.tracing.call_arguments import dropout_call
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.trace import Trace

__all__ = ["find_dropouts"]


def find_dropouts(
    trace: Trace, modules: Mapping[str, nn.Module], adapters: Adapters
) -> dict[str, float]:
    """Names of the modules, in the order of the forward, and their probability.

    Those of ``adapters`` are left out: they are given a deferred input, which saves bits by itself.
    """
    found: dict[str, float] = {}
    for op in trace.ops:
        module = modules.get(op.module)
        if not op.role.has(Role.DROPOUT) or type(module) is not nn.Dropout:
            continue
        call = dropout_call(op.args, op.kwargs)
        wanted = 0 < call.p < 1 and not call.in_place and op.outputs[0].requires_grad
        inside = any(op.module.startswith(f"{layer}.") for layer in adapters.layers)
        if wanted and not inside:
            found[op.module] = call.p
    return found
