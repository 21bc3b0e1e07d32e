"""Saved bytes of whole models beside the floor: ``python -m zoo.floors [model types...]``.

Each model type of transformers that has a class with a language model's head is built at the sizes of its
config, all layers, without memory for its weights, and a training step with its own loss is planned with
``auto``. Results are lines of zoo/results/floors.jsonl, written as they come; without names, the model types
that have no line yet are taken. The page docs/floors.md is made of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from lowmem_patch.bench.environment import environment
from lowmem_patch.config import load_config
from lowmem_patch.planning.floor import count_floor
from lowmem_patch.planning.planner import Planned, plan_model, trace_whole
from lowmem_patch.tracing.inputs import ExampleInputs
from zoo.build import build_without_data
from zoo.catalog import model_types
from zoo.feeds import feeds
from zoo.heads import head_class_of, labelled
from zoo.pool import Limits, quiet_worker, run_all
from zoo.result import PresetResult, Result
from zoo.store import RESULTS, environments, line, note_environment

FILE = RESULTS / "floors.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "floors.md"
_NAMED = ("date", "lowmem-patch", "torch", "transformers")
MOST = 1.02  # times the floor: what a model may save
PLANNED = "planned"
COUNTED = "floors"  # whose machine and versions stand beside those of the precisions


def judge_floor(model_type: str) -> Result:
    """For worker processes; ``status`` is `PLANNED`, or ``reason`` says why there is no plan."""
    quiet_worker()
    try:
        model = build_without_data(model_type, head_class_of)
    except LookupError as error:
        return Result(model_type, "no head", str(error))
    except Exception as error:  # whatever a foreign constructor raises
        return Result(model_type, "not built", _short(error))
    reason = "its forward takes no labels beside tokens"
    try:
        for feed, inputs in feeds(model_type, model):
            kwargs = labelled(model, inputs)
            if kwargs is None:
                continue
            try:
                planned = plan_model(model, load_config("auto"), kwargs)
            except Exception as error:  # whatever a foreign forward raises
                reason = _short(error)
                continue
            report = planned.report
            auto = PresetResult(saved_before=report.saved_before, saved_after=report.saved_after)
            return Result(
                model_type,
                PLANNED,
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                feed=feed,
                inputs=str(ExampleInputs((), kwargs)),
                presets={"auto": auto},
                above_floor=report.above_floor,
                reason=_most_above(planned) if report.above_floor > MOST else "",
            )
    except Exception as error:  # no inputs could be made
        reason = _short(error)
    return Result(model_type, "not planned", reason)


def _most_above(planned: Planned) -> str:
    """The function that saves most of what has no tensor of the floor for it, and where.

    A saved tensor has one of the floor if that has its bytes, or two of half of them, as gate and up in one;
    tensors of its own category come first.
    """
    items = count_floor(planned.facts).items
    allowed = Counter((item.category, item.bytes) for item in items)
    storages = trace_whole(planned.shadow, structure=False).saved.storages
    left = [s for s in storages if not _take(allowed, (s.category, s.bytes))]
    anywhere = Counter[tuple[str, int]]()
    for (_, size), count in allowed.items():
        anywhere["", size] += count
    sizes: Counter[str] = Counter()
    for storage in left:
        half = "", storage.bytes // 2
        if not _take(anywhere, ("", storage.bytes)) and not _take(anywhere, half, 2):
            saver = storage.savers[0]
            place = re.sub(r"\d+", "*", saver.module) or "the model"
            sizes[f"`{saver.function or 'an op of its own'}` in `{place}`"] += storage.bytes
    ((name, size),) = sizes.most_common(1)
    return f"{name}: {size / 2**20:.1f} MiB"


def _take(allowed: Counter[tuple[str, int]], key: tuple[str, int], count: int = 1) -> bool:
    """Whether so many tensors of a category and size are left, which are none then."""
    found = allowed[key] >= count
    if found:
        allowed[key] -= count
    return found


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def page(results: list[Result], made: dict[str, str], missing: int = 0) -> list[str]:
    """Lines of the page, the largest multiples first; ``missing`` model types have no result yet. ``made``:
    the machine and the versions of the results."""
    planned = sorted(
        (r for r in results if r.status == PLANNED), key=lambda r: (-r.above_floor, r.name)
    )
    others = [r for r in planned if r.above_floor > MOST]
    left = Counter(r.status for r in results if r.status not in (PLANNED, "no head"))
    left["without a result yet"] = missing
    versions = ", ".join(f"{name} {value}" for name, value in made.items() if name in _NAMED)
    return [
        "# Whole models beside the floor",
        "",
        "What autograd saves of a training step with `auto`, head and loss included, as a multiple of",
        "[the floor](strategies.md): the fewest bytes that the rule allows. Model types of transformers",
        "with a language model's head, all their layers, at the sizes of their configs, without data:",
        f"`python -m zoo.floors` (float32, {versions}).",
        "",
        f"{len(planned) - len(others)} of {len(planned)} model types save at most {MOST} times the floor.",
        f"Not counted: {_said(left)}.",
        "*Not built*: the default config makes no model. *Not planned*: the forward runs on no inputs that",
        "were made for it, or not without data.",
        "",
        f"The {len(others)} above {MOST}, and what saves most there of the tensors for which the floor has",
        "none. Most are recurrences (state spaces, linear attention) written out in torch, for which",
        "no kernel package was installed: the rule knows no such chains. Others multiply with a gate, a",
        "score or a scale that trains, and the product saves a tensor which nobody else does.",
        "",
        "| model type | parameters | unpatched MiB | auto MiB | times the floor | saves most |",
        "|---|---|---|---|---|---|",
        *map(_row, others),
    ]


def _said(left: Counter[str]) -> str:
    return (
        ", ".join(f"{count} {status}" for status, count in sorted(left.items()) if count) or "none"
    )


def _row(result: Result) -> str:
    auto = result.presets["auto"]
    mebibytes = (f"{size / 2**20:.1f}" for size in (auto.saved_before, auto.saved_after))
    parameters = f"{result.parameters / 1e6:,.0f} M"
    sizes = f"{parameters} | {' | '.join(mebibytes)} | {result.above_floor:.3f}"
    return f"| {result.name} | {sizes} | {result.reason} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.floors", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; default: those without a result")
    parser.add_argument("--workers", type=int, default=2, help="models at a time, one core each")
    parser.add_argument("--time-limit", type=int, default=180, help="seconds a model may take")
    arguments = parser.parse_args()
    results: dict[str, Result] = {}
    if FILE.exists():
        lines = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
        results = {row["name"]: Result.from_dict(row) for row in lines}
    names = arguments.names or [name for name in model_types() if name not in results]
    limits = Limits(seconds=arguments.time_limit, memory=None)
    for result in run_all(judge_floor, names, arguments.workers, limits=limits):
        results[result.name] = result
        with FILE.open("a", encoding="utf-8") as file:  # a run that is ended loses no other result
            file.write(line(result))
        print(
            f"{result.name}: {result.status} {result.reason[:120]} {result.above_floor:.4f}",
            flush=True,
        )
    ordered = [results[name] for name in sorted(results)]
    FILE.write_text("".join(map(line, ordered)), encoding="utf-8")
    missing = sum(name not in results for name in model_types())
    if names:
        note_environment(environment("cpu"), COUNTED)
    text = "\n".join(page(ordered, environments()[COUNTED], missing)) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    print(dict(Counter(result.status for result in ordered)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
