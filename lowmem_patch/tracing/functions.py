"""Activations and norms that a forward calls as functions (``F.silu(x)``), found in a trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from lowmem_patch.functional import ActivationKind
from lowmem_patch.tracing.call_arguments import CalledFunction, called_function
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import NormSpec, match_function
from lowmem_patch.tracing.trace import Call, Trace


class FunctionSite(NamedTuple):
    """A function that a module's forward calls, at one place or at several.

    Attributes:
        module: whose forward it is.
        function: what is called.
        kind: which activation it is, or what the norm computes.
        calls: each call, as if the function were a module.
    """

    module: str
    function: CalledFunction
    kind: ActivationKind | NormSpec
    calls: list[Call]

    @property
    def name(self) -> str:
        """As a report names it: ``layers.0.mlp.silu()``."""
        return f"{self.module}.{self.function}"

    def saved(self, trace: Trace) -> int:
        """Bytes that autograd holds for the function alone."""
        return sum(
            storage.bytes
            for storage in trace.saved.storages
            if all(
                (one.module, one.function) == (self.module, self.function.name)
                for one in storage.savers
            )
        )


_SITES = Role.ACTIVATION | Role.ROW_NORM


def find_functions(trace: Trace, is_site: Callable[[str], bool]) -> dict[str, FunctionSite]:
    """The activations, and norms without weights, that are called as functions and have a gradient, by name.

    Args:
        is_site: whether a module, by its name, is an activation or a norm as a whole, whatever it calls.
    """
    is_covered = cache(is_site)
    found: dict[tuple[str, CalledFunction], list[Call]] = {}
    kinds: dict[CalledFunction, ActivationKind | NormSpec | None] = {}
    for number, op in enumerate(trace.ops):
        # the model itself runs too many functions for a forward of ours around its own
        if not op.role.has(_SITES) or op.opaque or op.writes or not op.module:
            continue
        if is_covered(op.module):
            continue
        read = called_function(op.name, op.args, op.kwargs)
        if read is None or len(op.outputs) != 1 or not op.outputs[0].requires_grad:
            continue
        tensor, function = read
        call = Call(op.module, (tensor,), op.outputs, 1, number, number + 1, op.autocast)
        if function not in kinds:
            kinds[function] = match_function(op.func, function, call, trace)
        found.setdefault((op.module, function), []).append(call)
    sites = (
        FunctionSite(module, function, kind, calls)
        for (module, function), calls in found.items()
        if (kind := kinds[function]) is not None
    )
    return {site.name: site for site in sites}
