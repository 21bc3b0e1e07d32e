"""Plans, predictions, conversions, verdicts and the demo as tables."""

from __future__ import annotations

from collections.abc import Mapping

from lowmem_patch.checkpoint.convert import ConvertResult
from lowmem_patch.memory import MemoryReport
from lowmem_patch.planning.columns import Table, make_table
from lowmem_patch.planning.names import (
    collapse_names,
    fewer,
    group_by_pattern,
    human_bytes,
    pattern_of,
    starred,
)
from lowmem_patch.planning.report import PatchReport, block_rows
from lowmem_patch.profile import ProfileResult
from lowmem_patch.report.layout import NO_MORE_POSITIONS, print_line, print_table
from lowmem_patch.tracing.categories import CATEGORIES
from lowmem_patch.tracing.saved_bytes import SavedBytes
from lowmem_patch.verify import VerifyResult, worst_check

_BEFORE_AFTER = ("before", "after")
_BAR = 32  # characters
# what the data call otherwise: a block that is none, and a kind of tensor
_LABELS = {"(rest)": "outside the blocks", "rest": "other tensors"}
_SHARES = (*_BEFORE_AFTER, "fewer")


def print_plan(report: PatchReport, title: str, assumed: Mapping[str, str] | None = None) -> None:
    """A plan or report: sites (rows of repeated blocks collapsed), blocks, total, gradients.

    ``assumed``: name to text, of what the numbers depend on.
    """
    print_line(title)
    for name, text in (assumed or {}).items():
        print_line(f"  {name}: {text}", style="dim")
    print_table(report.site_table())
    print_line(report.about_sites, style="dim")
    print_line("")
    _print_blocks(report)
    for line in (*report.notes, *report.about_gradients):
        print_line(line)


def _print_blocks(report: PatchReport) -> None:
    numbers = (*_SHARES, "floor", "x floor")
    table = make_table("saved bytes in", *numbers, right=numbers)
    blocks = [
        (_LABELS.get(name, name), (before, after, report.floor_blocks.get(name, 0)))
        for name, before, after in report.blocks
    ]
    for label, sizes in group_by_pattern(blocks):
        table.add_row(label, *_with_floor(*sizes))
    _add_kinds(table, report.kinds.before, report.kinds.after, style="dim")
    total = _with_floor(report.saved_before, report.saved_after, report.floor)
    table.add_row("total", *total, style="bold")
    if report.weight_copies_before or report.weight_copies_after:
        copies = (report.weight_copies_before, report.weight_copies_after)
        table.add_row("copies of weights, apart", *map(human_bytes, copies), fewer(*copies))
    print_table(table)


def _add_kinds(
    table: Table, before: Mapping[str, int], after: Mapping[str, int], style: str | None = None
) -> None:
    """Bytes move from kind to kind: shares would say nothing, and neither would a kind's floor."""
    for kind in CATEGORIES:
        sizes = (before.get(kind, 0), after.get(kind, 0))
        if any(sizes):
            table.add_row(
                f"saved as {_LABELS.get(kind, kind)}", *map(human_bytes, sizes), style=style
            )


def _with_floor(before: int, after: int, floor: int) -> tuple[str, ...]:
    multiple = f"{after / floor:.3f}" if floor else "-"
    sizes = (human_bytes(before), human_bytes(after), fewer(before, after))
    return (*sizes, human_bytes(floor), multiple)


def print_memory(memory: MemoryReport, train: str) -> None:
    """What is held, the most that is alive in each moment of a step, and the largest size that fits."""
    length = "" if memory.length is None else f" x {memory.length} tokens"
    heading = f"one step, batch {memory.batch_size}{length}"
    table = make_table(heading, *_BEFORE_AFTER, right=_BEFORE_AFTER)
    both = (memory.before, memory.after)
    since = "from the beginning" if memory.training.accumulates else "from the backward on"
    parts = {
        "parameters, always held": "parameters",
        f"state of {memory.training.optimizer}, always held": "optimizer",
        f"gradients, held {since}": "gradients",
        "saved activations"
        + (", without checkpointing" if memory.training.checkpointing else ""): "saved",
        "copies of weights": "weight_copies",
    }
    if memory.before.workspace:
        parts["workspaces of cuBLAS, rounding of the model states"] = "workspace"
    for label, name in parts.items():
        table.add_row(label, *(human_bytes(getattr(footprint, name)) for footprint in both))
    for moment in memory.before.moments:
        sizes = (human_bytes(footprint.moments[moment]) for footprint in both)
        table.add_row(f"most in: {moment}", *sizes, style="dim")
    first, then = (footprint.peak_moment for footprint in both)
    label = f"peak (in {first})" if first == then else f"peak (before in {first}, after in {then})"
    table.add_row(label, *(human_bytes(footprint.total) for footprint in both), style="bold")
    if memory.limit is not None:
        _add_largest(table, memory, memory.limit, length)
    print_line("")
    print_table(table)
    columns = "before, after: the model unpatched and patched; most in: the largest sum in a part of a step"
    print_line(columns, style="dim")
    if memory.limit is not None and not memory.training.checkpointing:
        print_line(
            f"largest {memory.solved}: where no block runs again. Where blocks may, more fits: "
            f"--fit with --solve {memory.solved} finds the largest then",
            style="dim",
        )
    _print_bounds(memory, train)


def _add_largest(table: Table, memory: MemoryReport, limit: int, length: str) -> None:
    """The largest size that fits, and where none does what the size 1 takes."""
    largest = (memory.largest_before, memory.largest_after)
    label = f"largest {memory.solved} within {human_bytes(limit)}"
    table.add_row(label, *(str(size) if size else "none" for size in largest), style="bold")
    if not all(largest):
        least = (memory.least_before, memory.least_after)
        smallest = f"a batch of 1{length}" if memory.solved == "batch" else "a length of 1"
        table.add_row(f"peak of {smallest}", *(human_bytes(size or 0) for size in least))


def _print_bounds(memory: MemoryReport, train: str) -> None:
    """What the numbers do not hold."""
    if memory.bound is not None and memory.bound in (memory.largest_before, memory.largest_after):
        print_line(f"no length above {memory.bound} was looked for: {NO_MORE_POSITIONS}")
    text = "the CUDA context (about 0.5 GiB) and fragmentation come on top"
    if memory.limit is not None:
        text = (
            "a size that fits leaves 3 % of the bytes above the model states free for fragmentation; the "
            "CUDA context (about 0.5 GiB) comes on top; --fit adds rounding and a margin, and may need a "
            "little more"
        )
    if train.startswith("qlora"):
        text = (
            "qlora by arithmetic: base Linears in 4 bits, their scales in 8 (bnb_4bit_use_double_quant), "
            "everything else in the dtype above (PEFT's prepare_model_for_kbit_training makes norms, "
            "embeddings and what passes between blocks float32, which can hold twice as much); "
            + text
        )
    print_line(text, style="dim")


def print_profile(result: ProfileResult, title: str) -> None:
    """Saved bytes by kind and by module, before and after, and the peaks of a GPU."""
    print_line(f"{title}; device: {result.device}")
    table = make_table("saved bytes in", *_SHARES, right=_SHARES)
    saved = (result.before.saved, result.after.saved)
    for label, sizes in group_by_pattern(
        (_LABELS.get(name, name), tuple(sizes)) for name, *sizes in result.blocks
    ):
        table.add_row(label, *map(human_bytes, sizes), fewer(*sizes))
    _add_kinds(table, result.before.saved.by_kind, result.after.saved.by_kind)
    for label, sizes in _totals(result).items():
        style = "bold" if label == "total" else None
        table.add_row(label, *map(human_bytes, sizes), fewer(*sizes), style=style)
    print_table(table)
    print_line("")
    _print_modules(*saved)
    if result.wide_masks:
        text = "on a CPU a dropout's mask is as wide as the tensor: inspect counts a GPU's, of one byte"
        print_line(text, style="dim")


def _totals(result: ProfileResult) -> dict[str, tuple[int, int]]:
    """The sums before and after that are known, and not 0."""
    before, after = result.before, result.after
    totals = {
        "total": (before.saved.activations, after.saved.activations),
        "copies of weights, apart": (before.saved.weight_copies, after.saved.weight_copies),
        "peak allocated": (before.peak_allocated or 0, after.peak_allocated or 0),
        "peak reserved": (before.peak_reserved or 0, after.peak_reserved or 0),
    }
    return {label: sizes for label, sizes in totals.items() if any(sizes)}


def _print_modules(before: SavedBytes, after: SavedBytes) -> None:
    table = make_table("by module", *_BEFORE_AFTER, right=_BEFORE_AFTER)
    rows = block_rows(before.by_module, after.by_module)
    named = ((name or "(the model itself)", tuple(sizes)) for name, *sizes in rows)
    for label, sizes in group_by_pattern(named):
        table.add_row(label, *map(human_bytes, sizes))
    print_table(table)
    print_line(
        "each tensor is listed at the module that saves it first, which a patch may change",
        style="dim",
    )


def print_conversion(result: ConvertResult) -> None:
    """The norms: folded into which Linears, or the reason why not."""
    table = make_table("norm", "folded", "into, or why not")
    rows: dict[tuple[str, bool, str], list[str]] = {}
    for norm in result.norms:
        text = f"into {', '.join(norm.linears)}" if norm.folded else norm.reason
        rows.setdefault((pattern_of(norm.norm), norm.folded, starred(text)), []).append(norm.norm)
    for (_, folded, text), names in rows.items():
        table.add_row("\n".join(collapse_names(names)), "yes" if folded else "no", note=text)
    print_table(table)
    for check in result.checks:
        verdict = "ok" if check.passed else "FAILED"
        print_line(
            f"self-check: {check.name} is off by {check.error:.1e} from float64; the source itself by "
            f"{check.unpatched_error:.1e}; allowed {check.limit:.1e}: {verdict}"
        )
    for note in result.notes:
        print_line(f"note: {note}")
    count = f"{len(result.folded)} of {len(result.norms)} norms"
    if result.out is not None:
        text = f"folded {count} of {result.source} into {result.out} ({human_bytes(result.bytes)})"
    elif not result.folded:
        text = f"nothing to fold in {result.source}: each norm says why above"
    else:
        text = f"dry run: {count} of {result.source} would be folded; nothing was written"
    print_line(text, style="bold")


def print_verification(result: VerifyResult) -> None:
    """Errors beside the unpatched model's, saved bytes, approximate sites, the verdict."""
    print_line(f"{result.model}: {result.candidate}, on {result.inputs}")
    _print_errors(result)
    print_line("")
    if any(run.saved_before != run.saved_after for run in result.runs):
        table = make_table("saved bytes", *_SHARES, right=_SHARES)
        for run in result.runs:
            sizes = (run.saved_before, run.saved_after)
            table.add_row(run.dtype, *map(human_bytes, sizes), fewer(*sizes))
        print_table(table)
    else:
        why = "; a conversion prepares weights, and saves none by itself: patch_model does"
        converted = result.candidate.startswith("converted")
        print_line(f"saved bytes: the same in both{why if converted else ''}")
    print_line(
        "errors: relative L2 against the unpatched model in float64; in brackets: the number of tensors, of "
        "which the row shows the one nearest to its limit",
        style="dim",
    )
    if result.approximate_sites:
        names = ", ".join(collapse_names(result.approximate_sites))
        print_line(f"approximate derivatives at: {names}")
    for note in result.notes:
        print_line(f"note: {note}")
    print_line(result.verdict, style="bold green" if result.passed else "bold red")


def _print_errors(result: VerifyResult) -> None:
    numbers = ("error", "unpatched", "allowed", "cosine")
    table = make_table("dtype", "what", *numbers, "worst at", "", right=numbers, names=["worst at"])
    for run in result.runs:
        for name, checks in run.checks.items():
            worst = worst_check(checks)
            if worst is None:
                continue
            what = "approximate gradients" if name == "approximate" else name
            verdict = "ok" if all(check.passed for check in checks) else "FAILED"
            table.add_row(
                run.dtype, f"{what} ({len(checks)})", f"{worst.error:.1e}", f"{worst.unpatched_error:.1e}",
                f"{worst.limit:.1e}", f"{worst.cosine:.5f}", worst.name, verdict,
            )  # fmt: skip
    print_table(table)


def print_bars(sizes: Mapping[str, int]) -> None:
    """One bar for each number of bytes; shares are of the first."""
    first, longest = next(iter(sizes.values())), max([*sizes.values(), 1])
    table = make_table("saved bytes", "", "size", "share", right=["size", "share"])
    for label, size in sizes.items():
        bar = "#" * max(1, round(_BAR * size / longest))
        table.add_row(label, bar, human_bytes(size), f"{100 * size / max(first, 1):.0f} %")
    print_table(table)


def print_fine_tuning(runs: Mapping[str, Mapping[str, float]], score_name: str) -> None:
    """Fine-tuning runs by their labels: first and last loss, score before and after."""
    numbers = ("first loss", "last loss", f"{score_name} before", "after")
    table = make_table("model", *numbers, right=numbers)
    for label, run in runs.items():
        keys = ("first_loss", "last_loss", "score_before", "score_after")
        table.add_row(label, *(f"{run[key]:.4f}" for key in keys))
    print_table(table)
