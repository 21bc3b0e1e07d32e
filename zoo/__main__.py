"""Judge everything and write the coverage: ``python -m zoo [names...]``.

Names are model types of transformers or ``timm/<variant>``; without any, all of both. Results lie in
zoo/results/*.json and docs/coverage.md is made from them; named results replace their older ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from zoo.result import Result
from zoo.run import judge_name
from zoo.table import write_table

RESULTS = Path(__file__).parent / "results"
# a worker is replaced after so many models: some leak
MODELS_PER_WORKER = 60


def _file(name: str) -> Path:
    return RESULTS / ("timm.json" if name.startswith("timm/") else "transformers.json")


def load_results(path: Path) -> dict[str, Result]:
    """Results by name; empty where there is no file yet."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {row["name"]: Result.from_dict(row) for row in rows}


def _save(results: dict[str, Result], path: Path) -> None:
    rows: list[dict[str, Any]] = [results[name].to_dict() for name in sorted(results)]
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _progress(index: int, total: int, result: Result) -> None:
    detail = "; ".join(result.wrong) or result.reason
    if result.status == "judged":
        detail = f"{result.patched} of {result.sites} sites patched. {detail}"
    sign = "WRONG" if result.wrong else result.status
    print(f"{index}/{total} {result.name}: {sign} {detail[:400]} [{result.seconds} s]", flush=True)


def _names(arguments: argparse.Namespace) -> list[str]:
    if arguments.names:
        return list(arguments.names)
    from zoo.catalog import model_types
    from zoo.timm_models import variants

    names = [] if arguments.only == "timm" else model_types()
    if arguments.only != "transformers":
        names += [f"timm/{name}" for name in variants()]
    if arguments.resume:
        known = {**load_results(_file("timm/")), **load_results(_file(""))}
        names = [name for name in names if name not in known]
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types, or timm/<variant>; default: all")
    parser.add_argument("--only", choices=("transformers", "timm"), help="one of the two libraries")
    parser.add_argument("--resume", action="store_true", help="skip what has a result already")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = _names(arguments)
    wrong = 0
    with get_context("spawn").Pool(arguments.workers, maxtasksperchild=MODELS_PER_WORKER) as pool:
        for index, result in enumerate(pool.imap_unordered(judge_name, names), start=1):
            path = _file(result.name)
            results = load_results(path)
            results[result.name] = result
            _save(results, path)
            wrong += bool(result.wrong)
            _progress(index, len(names), result)
    write_table(load_results(_file("")), load_results(_file("timm/")))
    print(f"{wrong} of {len(names)} wrong; the table is docs/coverage.md")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
