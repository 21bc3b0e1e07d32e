"""docs/coverage.md from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from zoo.precision import FLOAT32, PRECISIONS
from zoo.result import TEXT_ALONE, PresetResult, Result

JUDGED = ("judged", "judged in part")
PLANNED = (*JUDGED, "no reference")
PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"

_HEAD = """# Coverage: every architecture, patched and judged

This page is written by `make zoo` (`python -m zoo`); the data is in `zoo/results/`. Each model is tiny,
with random weights whose gammas, betas and biases were moved from 1 and 0, and is judged against
float64: outputs of the patched model may be off by at most twice the unpatched model's own float32
error, gradients by at most three times, per tensor. Gradients of `paper` are those of a stock model with
the folded weights; where codes are kept, the step tables' derivative is the judge.
Checked besides: state-dict keys, the checkpoint loaded by the stock class, saved bytes, and that
unpatching gives back the function and the very module objects.
"""

_LOW_PRECISION = """## In bf16, under autocast and on a GPU

`python -m zoo --precision bf16` casts the model as transformers does, but for what a class keeps in float32
(`_keep_in_fp32_modules`); `--precision autocast` has float32 weights under a CPU's autocast to bf16;
`--precision gpu-bf16` and `gpu-float32` run on a GPU, with the Triton kernels and the attention that users
have there. `exact` and `auto` are judged against the same weights in float64: outputs and gradients within
the same factors of the unpatched model's own error in that precision; their dtypes; the dtypes in which
matmuls, convolutions and attention are computed, which must be the unpatched model's; saved bytes; undo.
"""
_EXCEPTED = [
    "Models that are wrong, that are judged in part (the unpatched model itself jumps), or that run in",
    "float32 alone:",
    "",
]

Groups = list[tuple[str, dict[str, dict[str, Result]]]]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "none"


def _summary(title: str, results: list[Result]) -> list[str]:
    status = Counter(result.status for result in results)
    judged = [result for result in results if result.status in JUDGED]
    planned = [result for result in results if result.status in PLANNED]
    raised = sum(any("raised" in problem for problem in result.wrong) for result in planned)
    outside = [result.name for result in judged if result.wrong]
    eligible = [result for result in planned if result.eligible]
    lines = [
        f"| {title} | |",
        "|---|---|",
        f"| architectures | {len(results)} |",
        f"| built and run | {len(planned)} |",
        f"| judged against float64 | {len(judged)} |",
        f"| of these, in part (reasons below) | {len(judged) - status['judged']} |",
        f"| exceptions in planning or patching | {raised} |",
        f"| with any finding outside its budget | {len(outside)}{_listed(outside)} |",
        "| with a site that could be patched | " + _share(len(eligible), len(planned)) + " |",
        "| of these, with a patched site in `auto` | "
        + _share(sum(result.patched > 0 for result in eligible), len(eligible))
        + " |",
        "| norms read by Linears alone that are folded or shared in `auto` | "
        + _share(sum(r.linear_norms_patched for r in planned), sum(r.linear_norms for r in planned))
        + " |",
    ]
    rest = {k: n for k, n in status.items() if k not in PLANNED}
    lines += [f"| {name} (reasons below) | {count} |" for name, count in sorted(rest.items())]
    return [*lines, ""]


def _listed(names: list[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def _error(preset: PresetResult | None, kind: str) -> str:
    if preset is None or kind not in preset.errors:
        return ""
    ours, own = preset.errors[kind]
    return f"{ours:.0e} / {own:.0e}"


def _strategies(preset: PresetResult | None) -> str:
    if preset is None:
        return ""
    patched = {name: n for name, n in preset.strategies.items() if name != "keep"}
    return ", ".join(f"{n} {name}" for name, n in sorted(patched.items()))


def _bytes(preset: PresetResult | None) -> str:
    if preset is None or not preset.saved_before:
        return ""
    return f"{preset.saved_after / preset.saved_before:.2f}"


def _row(result: Result) -> str:
    auto, exact = result.presets.get("auto"), result.presets.get("exact")
    reasons = "; ".join(f"{count} × {reason}" for reason, count in result.left_alone.items())
    cells = [
        result.name,
        str(result.sites),
        _strategies(auto),
        reasons.replace("|", "\\|"),
        _error(exact, "forward"),
        _error(exact, "gradient"),
        _bytes(exact),
        _bytes(auto),
    ]
    return "| " + " | ".join(cells) + " |"


def _reasons(results: list[Result]) -> list[str]:
    """Why norms that Linears read, and the rest, are left alone, over all models."""
    counted: Counter[str] = Counter()
    for result in results:
        counted.update(result.left_alone)
    lines = ["| left alone, over all models | sites |", "|---|---|"]
    rows = counted.most_common()
    lines += [f"| {reason.replace('|', chr(92) + '|')} | {count} |" for reason, count in rows[:40]]
    if len(rows) > 40:
        lines.append(f"| {len(rows) - 40} other reasons | {sum(n for _, n in rows[40:])} |")
    return [*lines, ""]


def _notes(results: list[Result]) -> list[str]:
    """Models whose own outputs or gradients jump under one rounding, whose images could not be made, and
    those without a reference."""
    lines = []
    for result in results:
        if result.status == "no reference":
            lines.append(f"- {result.name}: planned, not judged: {result.reason}")
        if result.feed.endswith(TEXT_ALONE):
            lines.append(
                f"- {result.name}: judged on {TEXT_ALONE}: no images or sounds that it takes were made"
            )
        if result.status == "judged in part":
            lines.append(f"- {result.name}: judged in part: {result.reason}")
        jumps = [note for preset in result.presets.values() for note in preset.jumps]
        if jumps:
            lines.append(f"- {result.name}: {jumps[0]}")
    if not lines:
        return []
    title = "## Judged with the unpatched model's own jumps, on text alone, or not judged"
    return [title, "", *lines, ""]


def _low_precision(groups: Groups, environments: dict[str, dict[str, str]]) -> list[str]:
    """Counts of the other precisions, and the models that are wrong or that float32 alone judges."""
    counts, models = [], []
    for title, by_precision in groups:
        for precision, results in by_precision.items():
            if precision == FLOAT32.name or not results:
                continue
            status = Counter(result.status for result in results.values())
            tried = f"{len(results)} of {len(by_precision[FLOAT32.name])}"
            judged = [result for result in results.values() if result.status in JUDGED]
            exact = sum("exact" in result.presets for result in judged)
            wrong = sum(bool(result.wrong) for result in results.values())
            not_run = len(results) - len(judged)
            numbers = (tried, len(judged), exact, status["judged in part"], wrong, not_run)
            counts.append(f"| {title}, {precision} | {' | '.join(map(str, numbers))} |")
            for name, result in results.items():
                for reason in _exceptions(result, by_precision[FLOAT32.name].get(name)):
                    models.append(f"- {name}, {precision}: {reason}")
    if not counts:
        return []
    head = [
        "| models | tried | judged with `auto` | with `exact` as well | in part | wrong | not run |",
        "|---|---|---|---|---|---|---|",
    ]
    made = [
        f"- {precision}: {_said(environment)}"
        for precision, environment in environments.items()
        if precision != FLOAT32.name and precision in PRECISIONS
    ]
    made = ["", "Machines and versions, where they are not those above:", "", *made] if made else []
    excepted = [*_EXCEPTED, *models] if models else []
    return [_LOW_PRECISION, *head, *counts, *made, "", *excepted, ""]


def _said(environment: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def _exceptions(result: Result, float32: Result | None) -> list[str]:
    lines = [f"wrong: {problem}" for problem in result.wrong]
    unlike_float32 = float32 is None or float32.status != result.status
    if result.status != "judged" and (unlike_float32 or result.status in JUDGED):
        lines.append(f"{result.status}: {' '.join(result.reason.split())[:240]}")
    return lines


def write_table(groups: Groups, environments: dict[str, dict[str, str]] | None = None) -> None:
    """Write the page; results that are missing are not on it.

    Args:
        groups: of each library a title, and its results by precision.
        environments: the machine and the versions by precision, where they were written down.
    """
    lines = [_HEAD]
    installed = {name: version(name) for name in ("torch", "transformers", "timm")}
    versions = (environments or {}).get(FLOAT32.name, installed)  # not those that write the page
    lines += [f"Versions: {_said(versions)}.", ""]
    in_float32 = [(title, by_precision[FLOAT32.name]) for title, by_precision in groups]
    for title, group in in_float32:
        if group:
            lines += _summary(title, [group[name] for name in sorted(group)])
    lines += _low_precision(groups, environments or {})
    everything = [result for _, group in in_float32 for result in group.values()]
    lines += ["## Why sites are left alone", "", *_reasons(everything)]
    lines += _notes(everything)
    for title, group in in_float32:
        if group:
            lines += _details(title, group.values())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _details(title: str, results: Iterable[Result]) -> list[str]:
    rows = sorted(results, key=lambda result: result.name)
    lines = [
        f"## {title[0].upper()}{title[1:]}",
        "",
        "Errors are ours / the unpatched model's; bytes are saved activations, patched over unpatched.",
        "",
        "| type | sites | patched in `auto` | left alone | forward, `exact` | gradient, `exact` "
        "| bytes, `exact` | bytes, `auto` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(r) for r in rows if r.status in PLANNED]
    others = [r for r in rows if r.status not in PLANNED]
    if others:
        lines += ["", "Not judged:", ""]
        lines += [f"- {r.name}: {r.status}: {' '.join(r.reason.split())[:240]}" for r in others]
    return [*lines, ""]
