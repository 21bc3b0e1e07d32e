"""Rendering: plans, conversions, verdicts and measurements as tables. The only importer of rich."""

from lowmem_patch.report.bench import print_bench
from lowmem_patch.report.layout import (
    collapse_names,
    human_bytes,
    print_error,
    print_title,
    progress_bar,
)
from lowmem_patch.report.results import (
    print_conversion,
    print_fine_tuning,
    print_memory,
    print_plan,
    print_profile,
    print_verification,
)
from lowmem_patch.report.tables import print_step_table, print_step_tables

__all__ = [
    "collapse_names",
    "human_bytes",
    "print_bench",
    "print_conversion",
    "print_error",
    "print_fine_tuning",
    "print_memory",
    "print_plan",
    "print_profile",
    "print_step_table",
    "print_step_tables",
    "print_title",
    "print_verification",
    "progress_bar",
]
