"""What the training runs say: paired differences with their confidence intervals, and learning curves."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from truth_tasks import CODES, CURVE_STEPS, HALVES, PRESETS, TASKS, UNPATCHED

from lowmem_patch.plot import require_matplotlib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "training-truth.md"
PICTURE = ROOT / "docs" / "training-truth.png"
BEGIN, END = "<!-- truth -->", "<!-- /truth -->"
ORDER = (HALVES, *PRESETS, *CODES)
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Results:
    """The lines of a file: what was run on which data, and the runs that ended well.

    ``parts`` are the environments of the file's beginning and of each time it was gone on with, each with the
    number of its runs.
    """

    header: dict[str, Any]
    runs: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    parts: list[tuple[dict[str, str], int]]

    def by_seed(self, task: str, variant: str, length: int = 1) -> dict[int, dict[str, Any]]:
        """The runs of one task and variant."""
        wanted = (task, variant, length)
        return {
            run["seed"]: run
            for run in self.runs
            if (run["task"], run["variant"], run["length"]) == wanted
        }


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and the half width of its confidence interval (nan for one pair)."""

    mean: float
    half_width: float
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return abs(self.mean) > self.half_width


def load(path: Path) -> Results:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = Results(lines[0], [], [], [])
    for line in lines:
        if "environment" in line:
            found.parts.append((line["environment"], 0))
        elif "error" in line:
            found.errors.append(line)
        else:
            found.runs.append(line)
            found.parts[-1] = (found.parts[-1][0], found.parts[-1][1] + 1)
    return found


def paired_difference(differences: list[float]) -> Difference:
    """Student's interval of the mean of differences, one for each seed."""
    count = len(differences)
    mean = float(np.mean(differences))
    if count < 2:
        return Difference(mean, float("nan"), count)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    error = np.std(differences, ddof=1) / np.sqrt(count)
    return Difference(mean, float(quantile * error), count)


def difference(
    results: Results, task: str, variant: str, key: str = "loss", length: int = 1
) -> Difference | None:
    """Of a variant from the unpatched runs with the same seeds; None without a pair."""
    own, other = (results.by_seed(task, name, length) for name in (variant, UNPATCHED))
    pairs = [own[seed][key] - other[seed][key] for seed in sorted(own.keys() & other.keys())]
    return paired_difference(pairs) if pairs else None


def _cell(found: Difference | None, most: int, digits: int, scale: float = 1) -> str:
    if found is None:
        return ""
    mean = f"{scale * found.mean:+.{digits}f}"
    if found.pairs < 2:
        return mean
    text = f"{mean} ± {scale * found.half_width:.{digits}f}"
    text = f"**{text}**" if found.clear else text
    return text if found.pairs == most else f"{text} ({found.pairs} seeds)"


def _table(results: Results, tasks: list[str], key: str, digits: int, scale: float) -> str:
    """One column a task: the unpatched mean and its spread over seeds, then differences from it."""
    columns = [results.by_seed(task, UNPATCHED) for task in tasks]
    units = ["%" if key == "accuracy" else TASKS[task].unit for task in tasks]
    heads = [f"{TASKS[task].title}, {unit}" for task, unit in zip(tasks, units, strict=True)]
    rows = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(tasks)]
    cells = []
    for runs in columns:
        values = [scale * run[key] for run in runs.values()]
        spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
        cells.append(f"{np.mean(values):.{digits}f}{spread} ({len(values)} seeds)")
    rows.append(f"| {UNPATCHED}, spread of seeds | {' | '.join(cells)} |")
    for variant in ORDER:
        found = [difference(results, task, variant, key) for task in tasks]
        if any(found):
            pairs = zip(found, columns, strict=True)
            cells = [_cell(one, len(runs), digits, scale) for one, runs in pairs]
            rows.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _long_table(results: Results) -> str:
    """The runs of more steps, one seed each."""
    rows = []
    for task, length in sorted({(r["task"], r["length"]) for r in results.runs if r["length"] > 1}):
        found = {name: results.by_seed(task, name, length) for name in (UNPATCHED, *ORDER)}
        reference = found[UNPATCHED].get(0)
        if reference is None:
            continue
        heads = [name for name, runs in found.items() if 0 in runs]
        rows += [
            f"| {TASKS[task].title}, {reference['steps']} steps | {' | '.join(heads)} |",
            "|---|" + "---|" * len(heads),
        ]
        losses = [found[name][0]["loss"] for name in heads]
        cells = [f"{loss:.4f} ({loss - reference['loss']:+.4f})" for loss in losses[1:]]
        rows.append(f"| {TASKS[task].unit} | {' | '.join([f'{losses[0]:.4f}', *cells])} |")
    return "\n".join(rows)


def tables(results: Results) -> str:
    """All tables, as Markdown."""
    tasks = [task for task in TASKS if results.by_seed(task, UNPATCHED)]
    if not tasks:
        return "No unpatched run has ended, so that there is nothing to compare with."
    parts = ["Held-out loss:", _table(results, tasks, "loss", 4, 1)]
    classes = [task for task in tasks if TASKS[task].unit == "nats"]
    if classes:
        parts += ["Share of right classes:", _table(results, classes, "accuracy", 2, 100)]
    long = _long_table(results)
    parts += ["One seed, ten times as long:", long] if long else []
    if results.errors:
        kinds = sorted({f"{_failed(line)}: {line['error']}" for line in results.errors})
        parts.append("Runs that failed: " + "; ".join(kinds))
    return "\n\n".join(parts)


def _failed(line: dict[str, Any]) -> str:
    return f"base of {line['base']}" if "base" in line else f"{line['task']}, {line['variant']}"


def _source(results: Results, path: Path) -> str:
    parts = []
    for part, count in results.parts:
        environment = dict(part)
        machine, date = environment.pop("machine"), environment.pop("date")
        versions = ", ".join(f"{name} {version}" for name, version in environment.items())
        parts.append(f"{count} runs on {machine}, {date}; {versions}. " * (count > 0))
    data = results.header["data"]
    name = (
        path.resolve().relative_to(ROOT).as_posix()
        if path.resolve().is_relative_to(ROOT)
        else path.name
    )
    return (
        f"`python benchmarks/truth.py --out {name}`: {''.join(parts)}"
        f"Packages told apart: {', '.join(data['packages'])}. Digits: {data['digits']}."
    )


def rendered(text: str, path: Path) -> str:
    """The page with the tables of a file of results."""
    results = load(path)
    parts = [tables(results), f"![Learning curves]({PICTURE.name})", _source(results, path)]
    new = "\n\n".join(parts) + "\n"
    pattern = re.compile(f"({BEGIN}\n).*?({END})", re.DOTALL)
    return pattern.sub(lambda match: match[1] + new + match[2], text)


def write_page(path: Path) -> None:
    """Write the tables into the page, and the picture beside it."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), path), encoding="utf-8")
    draw(load(path), PICTURE)
    print(tables(load(path)))


def draw(results: Results, path: Path) -> None:
    """Learning curves of all tasks, and below each the differences from the unpatched runs."""
    shown = [(task, 1) for task in TASKS] + sorted(
        {(r["task"], r["length"]) for r in results.runs if r["length"] > 1}
    )
    shown = [one for one in shown if results.by_seed(one[0], UNPATCHED, one[1])]
    columns = min(4, len(shown))
    bands = -(-len(shown) // columns)
    figure = require_matplotlib()(figsize=(4 * columns, 5.2 * bands), dpi=110, layout="constrained")
    axes = figure.subplots(2 * bands, columns, squeeze=False)
    for place in axes.flat:
        place.set_visible(False)
    labels: dict[str, Any] = {}
    for number, (task, length) in enumerate(shown):
        band, column = divmod(number, columns)
        pair = axes[2 * band][column], axes[2 * band + 1][column]
        labels |= _draw_task(pair, results, task, length)
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(path)


def _draw_task(pair: Any, results: Results, task: str, length: int) -> dict[str, Any]:
    above, below = pair
    unpatched = results.by_seed(task, UNPATCHED, length)
    lines: dict[str, Any] = {}
    for number, variant in enumerate((UNPATCHED, *ORDER)):
        runs = results.by_seed(task, variant, length)
        seeds = sorted(runs.keys() & unpatched.keys())
        if not seeds:
            continue
        curves, others = (
            np.array([found[seed]["curve"] for seed in seeds]) for found in (runs, unpatched)
        )
        steps = CURVE_STEPS * (np.arange(curves.shape[1]) + 1)
        style = {"color": f"C{number}", "linewidth": 1.2}
        (lines[variant],) = above.plot(steps, curves.mean(0), label=variant, **style)
        if variant != UNPATCHED:
            below.plot(steps, (curves - others).mean(0), **style)
    for axes in pair:
        axes.set_visible(True)
        axes.tick_params(labelsize=8)
    above.set_title(
        TASKS[task].title + (f", {length} times as long" if length > 1 else ""), fontsize=10
    )
    above.set_ylabel(f"training loss, {TASKS[task].unit}", fontsize=8)
    below.axhline(0, color="black", linewidth=0.6)
    below.set_ylabel(f"difference from {UNPATCHED}", fontsize=8)
    below.set_xlabel("step", fontsize=8)
    if len(steps) > 8:  # the first steps differ by nothing but would set the scale
        late = [line.get_ydata()[len(steps) // 4 :] for line in below.get_lines()[:-1]]
        most = max((float(np.abs(values).max()) for values in late), default=0.0)
        if most:
            below.set_ylim(-1.3 * most, 1.3 * most)
    return lines
