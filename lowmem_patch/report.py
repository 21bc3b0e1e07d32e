"""Rendering: plans, conversions, verdicts and the demo as tables. The only importer of rich."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from lowmem_patch.checkpoint.compare import TensorCheck
from lowmem_patch.checkpoint.convert import ConvertResult
from lowmem_patch.kinds import KINDS
from lowmem_patch.memory import MemoryReport
from lowmem_patch.patching.sites import PatchReport, Site
from lowmem_patch.profile import ProfileResult
from lowmem_patch.verify import VerifyResult, worst_check

__all__ = [
    "collapse_names",
    "error_console",
    "human_bytes",
    "print_conversion",
    "print_error",
    "print_fine_tuning",
    "print_memory",
    "print_plan",
    "print_profile",
    "print_title",
    "print_verification",
    "progress_bar",
    "stdout_console",
]

# wide enough for a module path beside its reason where output is not a terminal
_PIPE_WIDTH = 140
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def stdout_console() -> Console:
    """For results. Made anew each time: standard output may have been redirected since."""
    return Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False
    )


def error_console() -> Console:
    """For everything that is not a result."""
    return Console(
        file=sys.stderr, width=None if sys.stderr.isatty() else _PIPE_WIDTH, highlight=False
    )


def print_error(message: str) -> None:
    """One line on standard error, never wrapped."""
    text = " ".join(message.split())
    error_console().print(f"error: {text}", style="red", markup=False, soft_wrap=True)


def print_title(text: str) -> None:
    """A heading between the parts of a longer output."""
    stdout_console().rule(text, align="left", style="dim")


@contextlib.contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on standard error; yields a callback ``(what, done, total)``. No bar when not a terminal."""
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = error_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell


def human_bytes(count: int) -> str:
    """1024 bytes = 1 KiB; whole bytes below that."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def _fewer(before: int, after: int) -> str:
    return f"{100 * (1 - after / before):.1f} %" if before else "-"


def _pattern(text: str) -> str:
    return _NUMBER.sub("{}", text)


def collapse_names(names: Sequence[str]) -> list[str]:
    """``["layers.0.norm", "layers.1.norm"]`` -> ``["layers.{0..1}.norm"]``; others stay apart."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(tuple(int(n) for n in _NUMBER.findall(name)))
    collapsed = []
    for pattern, numbers in groups.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        # only a full grid of numbers may be written as ranges; else something would be claimed too much
        if sorted(numbers) == sorted(itertools.product(*columns)):
            collapsed.append(pattern.format(*map(_ranges, columns)))
        else:
            by_head: dict[tuple[int, ...], list[int]] = {}
            for *head, last in numbers:
                by_head.setdefault(tuple(head), []).append(last)
            collapsed += [
                pattern.format(*head, _ranges(sorted(lasts))) for head, lasts in by_head.items()
            ]
    return collapsed


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``{0..2,5}``; a single number stays bare."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}")
    return parts[0] if len(numbers) == 1 else "{" + ",".join(parts) + "}"


def _starred(text: str) -> str:
    return _NUMBER.sub("*", text)


def _table(*headers: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    numeric = set(right)
    for header in headers:
        # the first column names things, and the last one explains: only that one may wrap
        last = header == headers[-1] and header not in numeric
        table.add_column(
            header,
            justify="right" if header in numeric else "left",
            no_wrap=not last,
            overflow="fold",
        )
    return table


def print_plan(report: PatchReport, title: str) -> None:
    """A plan or report: sites (rows of repeated blocks collapsed), blocks, total, what is approximate."""
    console = stdout_console()
    console.print(title, markup=False, soft_wrap=True)
    table = _table("site", "kind", "strategy", "before", "after", "why", right=("before", "after"))
    groups: dict[tuple[object, ...], list[Site]] = {}
    for site in (*report.patched, *report.left_alone):
        key = (
            site.strategy, site.kind, _pattern(site.name), _starred(site.reason), site.approximate,
            site.bytes_before, site.bytes_after,
        )  # fmt: skip
        groups.setdefault(key, []).append(site)
    for sites in groups.values():
        first = sites[0]
        reason = first.reason if len(sites) == 1 else _starred(first.reason)
        strategy = first.strategy + (" (approximate)" if first.approximate else "")
        sizes = (human_bytes(first.bytes_before), human_bytes(first.bytes_after))
        names = "\n".join(collapse_names([site.name for site in sites]))
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
    sizes = (human_bytes(before), human_bytes(after), _fewer(before, after))
    return (*sizes, human_bytes(floor), multiple)


def print_memory(memory: MemoryReport, train: str) -> None:
    """The predicted peak of a training step, part by part, and what fits."""
    console = stdout_console()
    length = "" if memory.length is None else f" x {memory.length} tokens"
    heading = f"peak of a step, batch {memory.batch_size}{length}"
    table = _table(heading, "before", "after", right=("before", "after"))
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
        text = "qlora by arithmetic: base Linears in 4 bits, doubly quantised; " + text
    console.print(text, style="dim", markup=False, soft_wrap=True)


def print_profile(result: ProfileResult, title: str) -> None:
    """Saved bytes by kind and by module, before and after, and the peaks of a GPU."""
    console = stdout_console()
    console.print(f"{title}, on {result.device}", markup=False, soft_wrap=True)
    both = (result.before, result.after)
    table = _table("saved bytes in", "before", "after", "fewer", right=("before", "after", "fewer"))
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name in dict.fromkeys([*result.before.saved.by_module, *result.after.saved.by_module]):
        before, after = (measured.saved.by_module.get(name, 0) for measured in both)
        groups.setdefault((_pattern(name), before, after), []).append(name)
    for (_, before, after), names in groups.items():
        for name in collapse_names(names):
            label = (name or "(the model itself)") + (" (each)" if len(names) > 1 else "")
            table.add_row(label, human_bytes(before), human_bytes(after), _fewer(before, after))
    rows = [(f"kept as {kind}", [m.saved.by_kind[kind] for m in both]) for kind in KINDS]
    rows.append(("total", [m.saved.activations for m in both]))
    rows.append(("copies of weights, apart", [m.saved.weight_copies for m in both]))
    rows.append(("peak allocated", [m.peak_allocated or 0 for m in both]))
    rows.append(("peak reserved", [m.peak_reserved or 0 for m in both]))
    for label, (before, after) in rows:
        if before or after:
            style = "bold" if label == "total" else None
            cells = (human_bytes(before), human_bytes(after), _fewer(before, after))
            table.add_row(label, *cells, style=style)
    console.print(table, markup=False)


def _print_blocks(console: Console, report: PatchReport) -> None:
    kinds = report.kinds
    numbers = ("before", "after", "fewer", "floor", "after / floor")
    table = _table("saved bytes in", *numbers, right=numbers)
    groups: dict[tuple[str, int, int, int], list[str]] = {}
    for name, before, after in report.blocks:
        floor = report.floor_blocks.get(name, 0)
        groups.setdefault((_pattern(name), before, after, floor), []).append(name)
    for (_, before, after, floor), names in groups.items():
        for name in collapse_names(names):
            label = name if len(names) == 1 else f"{name} (each)"
            table.add_row(label, *_row(before, after, floor))
    for kind in KINDS:
        sizes = [part.get(kind, 0) for part in (kinds.before, kinds.after, kinds.floor)]
        if any(sizes):
            table.add_row(f"kept as {kind}", *_row(*sizes), style="dim")
    table.add_row(
        "total", *_row(report.saved_before, report.saved_after, report.floor), style="bold"
    )
    if report.weight_copies_before or report.weight_copies_after:
        copies = (report.weight_copies_before, report.weight_copies_after)
        table.add_row("copies of weights, apart", *map(human_bytes, copies), _fewer(*copies))
    console.print()
    console.print(table, markup=False)


def print_conversion(result: ConvertResult) -> None:
    """What was folded and what was not, and why."""
    console = stdout_console()
    table = _table("norm", "folded", "into, or why not")
    rows: dict[tuple[str, bool, str], list[str]] = {}
    for norm in result.norms:
        text = ", ".join(norm.linears) if norm.folded else norm.reason
        rows.setdefault((_pattern(norm.norm), norm.folded, _starred(text)), []).append(norm.norm)
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
    table = _table(
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
            allowed = f"{worst.limit:.1e}" if worst.limit < float("inf") else "-"
            verdict = "ok" if all(check.passed for check in checks) else "FAILED"
            table.add_row(
                run.dtype, f"{kind} ({len(checks)})", f"{worst.error:.1e}", f"{worst.unpatched_error:.1e}",
                allowed, f"{worst.cosine:.5f}", worst.name, verdict,
            )  # fmt: skip
    console.print(table, markup=False)
    saved = _table("saved bytes", "before", "after", "fewer", right=("before", "after", "fewer"))
    for run in result.runs:
        sizes = (run.saved_before, run.saved_after)
        saved.add_row(run.dtype, *map(human_bytes, sizes), _fewer(*sizes))
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
    table = _table(
        "fine-tuning", "saved bytes", "copies of weights", f"{score_name} before", "after", "seconds",
        right=("saved bytes", "copies of weights", f"{score_name} before", "after", "seconds"),
    )  # fmt: skip
    for label, saved, copies, before, after, seconds in rows:
        sizes = (human_bytes(saved), human_bytes(copies))
        table.add_row(label, *sizes, f"{before:.3f}", f"{after:.3f}", f"{seconds:.1f}")
    stdout_console().print(table, markup=False)
