"""Plans, predictions, conversions, verdicts and the demo as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lowmem_patch.checkpoint.compare import TensorCheck
from lowmem_patch.checkpoint.convert import ConvertResult
from lowmem_patch.memory import MemoryReport
from lowmem_patch.planning.report import PatchReport, Site
from lowmem_patch.profile import ProfileResult
from lowmem_patch.report.layout import (
    collapse_names,
    fewer,
    human_bytes,
    make_table,
    pattern_of,
    starred,
    stdout_console,
)
from lowmem_patch.tracing.categories import CATEGORIES
from lowmem_patch.verify import VerifyResult, worst_check

__all__ = [
    "print_conversion",
    "print_fine_tuning",
    "print_memory",
    "print_plan",
    "print_profile",
    "print_verification",
]


def print_plan(report: PatchReport, title: str) -> None:
    """A plan or report: sites (rows of repeated blocks collapsed), blocks, total, what is approximate."""
    console = stdout_console()
    console.print(title, markup=False, soft_wrap=True)
    table = make_table(
        "site", "kind", "strategy", "before", "after", "why", right=("before", "after")
    )
    groups: dict[tuple[object, ...], list[Site]] = {}
    for site in (*report.patched, *report.left_alone):
        key = (
            site.strategy, site.kind, pattern_of(site.name), starred(site.reason), site.approximate,
            site.bytes_before, site.bytes_after,
        )  # fmt: skip
        groups.setdefault(key, []).append(site)
    for sites in groups.values():
        first = sites[0]
        reason = first.reason if len(sites) == 1 else starred(first.reason)
        strategy = first.strategy + (" (approximate)" if first.approximate else "")
        sizes = (human_bytes(first.bytes_before), human_bytes(first.bytes_after))
        each = " (each)" if len(sites) > 1 else ""
        names = "\n".join(name + each for name in collapse_names([site.name for site in sites]))
        table.add_row(names, first.kind, strategy, *sizes, reason)
    console.print(table, markup=False)
    _print_blocks(console, report)
    if report.approximate:
        kinds = ", ".join(sorted({site.kind for site in report.approximate}))
        console.print(
            f"approximate: the gradients of {len(report.approximate)} activations ({kinds}) use 2-bit "
            "step derivatives; every other gradient formula is exact",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)


def _row(before: int, after: int, floor: int) -> tuple[str, ...]:
    multiple = f"{after / floor:.3f}" if floor else "-"
    sizes = (human_bytes(before), human_bytes(after), fewer(before, after))
    return (*sizes, human_bytes(floor), multiple)


def print_memory(memory: MemoryReport, train: str) -> None:
    """The predicted peak of a training step, part by part, and what fits."""
    console = stdout_console()
    length = "" if memory.length is None else f" x {memory.length} tokens"
    heading = f"peak of a step, batch {memory.batch_size}{length}"
    table = make_table(heading, "before", "after", right=("before", "after"))
    rows = (
        ("parameters", "parameters"),
        ("gradients", "gradients"),
        (f"state of {memory.optimizer}", "optimizer"),
        ("saved activations", "saved"),
        ("copies of weights", "weight_copies"),
        ("loss and one block's backward", "transient"),
    )
    for label, name in rows:
        table.add_row(
            label, *(human_bytes(getattr(m, name)) for m in (memory.before, memory.after))
        )
    total = (memory.before.total, memory.after.total)
    table.add_row("total", *map(human_bytes, total), style="bold")
    if memory.limit is not None:
        largest = (memory.largest_before, memory.largest_after)
        cells = [str(size) if size else "does not fit" for size in largest]
        label = f"largest {memory.solved} within {human_bytes(memory.limit)}"
        table.add_row(label, *cells, style="bold")
    console.print()
    console.print(table, markup=False)
    if memory.bound is not None and memory.bound in (memory.largest_before, memory.largest_after):
        text = f"{memory.bound} is as long as the model's positions reach"
        console.print(text, markup=False, soft_wrap=True)
    text = "the CUDA context (about 0.5 GiB) and fragmentation come on top"
    if train.startswith("qlora"):
        text = (
            "qlora by arithmetic: base Linears in 4 bits, doubly quantised, everything else in the "
            "dtype above (PEFT's prepare_model_for_kbit_training makes norms, embeddings and the rows "
            "between blocks float32, which can keep twice as much); " + text
        )
    console.print(text, style="dim", markup=False, soft_wrap=True)


def print_profile(result: ProfileResult, title: str) -> None:
    """Saved bytes by kind and by module, before and after, and the peaks of a GPU."""
    console = stdout_console()
    console.print(f"{title}, on {result.device}", markup=False, soft_wrap=True)
    both = (result.before, result.after)
    table = make_table(
        "saved bytes in", "before", "after", "fewer", right=("before", "after", "fewer")
    )
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name in dict.fromkeys([*result.before.saved.by_module, *result.after.saved.by_module]):
        before, after = (measured.saved.by_module.get(name, 0) for measured in both)
        groups.setdefault((pattern_of(name), before, after), []).append(name)
    for (_, before, after), names in groups.items():
        for name in collapse_names(names):
            label = (name or "(the model itself)") + (" (each)" if len(names) > 1 else "")
            table.add_row(label, human_bytes(before), human_bytes(after), fewer(before, after))
    rows = [(f"kept as {kind}", [m.saved.by_kind[kind] for m in both]) for kind in CATEGORIES]
    rows.append(("total", [m.saved.activations for m in both]))
    rows.append(("copies of weights, apart", [m.saved.weight_copies for m in both]))
    rows.append(("peak allocated", [m.peak_allocated or 0 for m in both]))
    rows.append(("peak reserved", [m.peak_reserved or 0 for m in both]))
    for label, (before, after) in rows:
        if before or after:
            style = "bold" if label == "total" else None
            # bytes move from kind to kind: shares would say nothing
            share = "" if label.startswith("kept as") else fewer(before, after)
            table.add_row(label, human_bytes(before), human_bytes(after), share, style=style)
    console.print(table, markup=False)


def _print_blocks(console: Console, report: PatchReport) -> None:
    kinds = report.kinds
    numbers = ("before", "after", "fewer", "floor", "after / floor")
    table = make_table("saved bytes in", *numbers, right=numbers)
    groups: dict[tuple[str, int, int, int], list[str]] = {}
    for name, before, after in report.blocks:
        floor = report.floor_blocks.get(name, 0)
        groups.setdefault((pattern_of(name), before, after, floor), []).append(name)
    for (_, before, after, floor), names in groups.items():
        for name in collapse_names(names):
            label = name if len(names) == 1 else f"{name} (each)"
            table.add_row(label, *_row(before, after, floor))
    for kind in CATEGORIES:
        sizes = [part.get(kind, 0) for part in (kinds.before, kinds.after, kinds.floor)]
        if any(sizes):
            # bytes move from kind to kind: shares would say nothing
            kept, left, least = map(human_bytes, sizes)
            table.add_row(f"kept as {kind}", kept, left, "", least, "", style="dim")
    table.add_row(
        "total", *_row(report.saved_before, report.saved_after, report.floor), style="bold"
    )
    if report.weight_copies_before or report.weight_copies_after:
        copies = (report.weight_copies_before, report.weight_copies_after)
        table.add_row("copies of weights, apart", *map(human_bytes, copies), fewer(*copies))
    console.print()
    console.print(table, markup=False)


def print_conversion(result: ConvertResult) -> None:
    """What was folded and what was not, and why."""
    console = stdout_console()
    table = make_table("norm", "folded", "into, or why not")
    rows: dict[tuple[str, bool, str], list[str]] = {}
    for norm in result.norms:
        text = ", ".join(norm.linears) if norm.folded else norm.reason
        rows.setdefault((pattern_of(norm.norm), norm.folded, starred(text)), []).append(norm.norm)
    for (_, folded, text), names in rows.items():
        table.add_row("\n".join(collapse_names(names)), "yes" if folded else "no", text)
    console.print(table, markup=False)
    for check in result.checks:
        console.print(_check_line("self-check", check), markup=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    count = f"{len(result.folded)} of {len(result.norms)} norms"
    if result.out is not None:
        text = f"folded {count} of {result.source} into {result.out} ({human_bytes(result.bytes)})"
    elif not result.folded:
        text = f"nothing to fold in {result.source}: no norm can become an identity in a stock checkpoint"
    else:
        text = f"dry run: {count} of {result.source} would be folded; nothing was written"
    console.print(text, markup=False, soft_wrap=True, style="bold")


def _check_line(what: str, check: TensorCheck) -> str:
    verdict = "ok" if check.passed else "FAILED"
    return (
        f"{what}: {check.name} is off by {check.error:.1e} from float64; the source itself by "
        f"{check.unpatched_error:.1e}; allowed {check.limit:.1e}: {verdict}"
    )


def print_verification(result: VerifyResult) -> None:
    """Errors beside the unpatched model's, saved bytes, what is approximate, the verdict."""
    console = stdout_console()
    console.print(
        f"{result.model}: {result.candidate}, on {result.inputs}", markup=False, soft_wrap=True
    )
    table = make_table(
        "dtype", "what", "error", "unpatched", "allowed", "cosine", "worst at", "",
        right=("error", "unpatched", "allowed", "cosine"),
    )  # fmt: skip
    for run in result.runs:
        kinds = (
            ("outputs", run.outputs),
            ("gradients", run.gradients),
            ("approximate gradients", run.approximate),
        )
        for kind, checks in kinds:
            worst = worst_check(checks)
            if worst is None:
                continue
            allowed = f"{worst.limit:.1e}" if worst.limit < float("inf") else "cosine > 0"
            verdict = "ok" if all(check.passed for check in checks) else "FAILED"
            table.add_row(
                run.dtype, f"{kind} ({len(checks)})", f"{worst.error:.1e}", f"{worst.unpatched_error:.1e}",
                allowed, f"{worst.cosine:.5f}", worst.name, verdict,
            )  # fmt: skip
    console.print(table, markup=False)
    saved = make_table(
        "saved bytes", "before", "after", "fewer", right=("before", "after", "fewer")
    )
    for run in result.runs:
        sizes = (run.saved_before, run.saved_after)
        saved.add_row(run.dtype, *map(human_bytes, sizes), fewer(*sizes))
    console.print()
    console.print(saved, markup=False)
    console.print(
        "errors: relative L2 against the unpatched model in float64", style="dim", soft_wrap=True
    )
    if result.approximate_sites:
        names = ", ".join(collapse_names(result.approximate_sites))
        console.print(f"approximate derivatives at: {names}", markup=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    style = "bold green" if result.passed else "bold red"
    console.print("passed" if result.passed else "FAILED", style=style)


def print_fine_tuning(
    rows: Sequence[tuple[str, int, int, float, float, float]], score_name: str
) -> None:
    """Fine-tuning runs: label, saved bytes, weight copies, score before and after, seconds."""
    table = make_table(
        "fine-tuning", "saved bytes", "copies of weights", f"{score_name} before", "after", "seconds",
        right=("saved bytes", "copies of weights", f"{score_name} before", "after", "seconds"),
    )  # fmt: skip
    for label, saved, copies, before, after, seconds in rows:
        sizes = (human_bytes(saved), human_bytes(copies))
        table.add_row(label, *sizes, f"{before:.3f}", f"{after:.3f}", f"{seconds:.1f}")
    stdout_console().print(table, markup=False)
