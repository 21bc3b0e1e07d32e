"""Norms and activations that the example inputs never reach: no site, so they are named."""

from __future__ import annotations

from torch import nn

from lowmem_patch.patching.match import looks_like_norm, match_activation
from lowmem_patch.patching.trace import Trace

__all__ = ["unreached_note"]

_NAMED = 3


def unreached_note(model: nn.Module, trace: Trace) -> str | None:
    """How many of them did not run (an image tower, where the inputs are text alone), or None."""
    ran = {call.name for call in trace.calls}
    found: dict[
        type, bool
    ] = {}  # by type: an activation is told by running it, and experts are many
    names = []
    for name, module in model.named_modules():
        if name not in ran:
            if type(module) not in found:
                found[type(module)] = (
                    looks_like_norm(module) or match_activation(module) is not None
                )
            names += [name] * found[type(module)]
    if not names:
        return None
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return (
        f"{len(names)} norms or activations did not run on the example inputs: left alone ({named}); "
        "pass example_inputs= that reach them"
    )
