"""Modules that run kernels of their own (Liger's, mamba's): a trace sees what they read, and no more."""

from __future__ import annotations

from torch import nn

from lowmem_patch.patching.trace import FOREIGN_KERNEL, Trace, describe

__all__ = ["foreign_kernels", "foreign_kernels_note"]

_NAMED = 3


def foreign_kernels(trace: Trace) -> dict[str, None]:
    """Names of the modules that ran one, in the order of the forward."""
    return {op.module: None for op in trace.ops if op.name == FOREIGN_KERNEL}


def foreign_kernels_note(model: nn.Module, trace: Trace) -> str | None:
    """How many modules run such kernels, and which; None if there are none."""
    places = [describe(model.get_submodule(name), name) for name in foreign_kernels(trace)]
    if not places:
        return None
    named = ", ".join(places[:_NAMED]) + (", ..." if len(places) > _NAMED else "")
    return f"{len(places)} modules run kernels of their own, which are left alone ({named})"
