"""Rendering: plans, conversions, verdicts and measurements as tables. The only importer of rich."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_patch.report.bench import print_bench
    from lowmem_patch.report.layout import (
        collapse_names,
        human_bytes,
        print_error,
        print_line,
        print_title,
        progress_bar,
        spinner,
        stop_spinner,
    )
    from lowmem_patch.report.results import (
        print_bars,
        print_conversion,
        print_fine_tuning,
        print_memory,
        print_plan,
        print_profile,
        print_verification,
    )
    from lowmem_patch.report.tables import print_step_table, print_step_tables

# Imported when they are first asked for: results need torch, for which a spinner shall not wait.
_HOMES = {
    "collapse_names": "layout",
    "human_bytes": "layout",
    "print_bars": "results",
    "print_bench": "bench",
    "print_conversion": "results",
    "print_error": "layout",
    "print_fine_tuning": "results",
    "print_line": "layout",
    "print_memory": "results",
    "print_plan": "results",
    "print_profile": "results",
    "print_step_table": "tables",
    "print_step_tables": "tables",
    "print_title": "layout",
    "print_verification": "results",
    "progress_bar": "layout",
    "spinner": "layout",
    "stop_spinner": "layout",
}
__all__ = [
    "collapse_names",
    "human_bytes",
    "print_bars",
    "print_bench",
    "print_conversion",
    "print_error",
    "print_fine_tuning",
    "print_line",
    "print_memory",
    "print_plan",
    "print_profile",
    "print_step_table",
    "print_step_tables",
    "print_title",
    "print_verification",
    "progress_bar",
    "spinner",
    "stop_spinner",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
