"""Norms and activations that a forward calls as functions: no modules to swap, so they are named."""

from __future__ import annotations

from collections.abc import Iterable

from lowmem_patch.patching.trace import Trace

__all__ = ["functional_calls_note"]

_FUNCTIONS = frozenset(("gelu", "silu", "layer_norm", "rms_norm"))
_NAMED = 3


def functional_calls_note(trace: Trace, sites: Iterable[str]) -> str | None:
    """How many calls of such functions lie outside the sites, and where; None if there are none."""
    known = set(sites)
    places: dict[str, None] = {}
    calls = 0
    for op in trace.ops:
        if op.name in _FUNCTIONS and op.module not in known:
            calls += 1
            places[f"F.{op.name} in {op.module or 'the model itself'}"] = None
    if not calls:
        return None
    named = ", ".join(list(places)[:_NAMED]) + (", ..." if len(places) > _NAMED else "")
    return f"{calls} norms or activations are function calls and not modules: left alone ({named})"
