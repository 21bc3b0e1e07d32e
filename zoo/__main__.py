"""Judge everything and write the coverage: ``python -m zoo [names...]``.

Names are model types of transformers or ``timm/<variant>``; without any, all of both. Results are
lines of zoo/results/*.jsonl, from which docs/coverage.md is made; a new one replaces an older one.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from lowmem_patch.bench.environment import environment
from zoo import store
from zoo.pool import Limits, run_all
from zoo.precision import FLOAT32, PRECISIONS
from zoo.result import Result
from zoo.run import judge_name
from zoo.table import write_table


def _progress(index: int, total: int, result: Result) -> None:
    detail = "; ".join(result.wrong) or result.reason
    if result.sites:
        detail = f"{result.patched} of {result.sites} sites patched. {detail}"
    sign = "WRONG" if result.wrong else result.status
    print(f"{index}/{total} {result.name}: {sign} {detail[:400]} [{result.seconds} s]", flush=True)


def _names(arguments: argparse.Namespace) -> list[str]:
    names = list(arguments.names)
    if not names:
        from zoo.catalog import model_types
        from zoo.timm_models import variants

        names = [] if arguments.only == "timm" else model_types()
        if arguments.only != "transformers":
            names += [f"timm/{name}" for name in variants()]
    if arguments.resume:
        done = set[str]().union(
            *(store.load(library, precision=arguments.precision) for library in store.LIBRARIES)
        )
        names = [name for name in names if name not in done]
    return names


def _write_page() -> None:
    titles = ("transformers model types", "timm variants")
    write_table(
        [
            (title, {name: store.load(library, precision=name) for name in PRECISIONS})
            for title, library in zip(titles, store.LIBRARIES, strict=True)
        ],
        store.environments(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types, or timm/<variant>; default: all")
    parser.add_argument("--only", choices=store.LIBRARIES, help="one of the two libraries")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default=FLOAT32.name, help="in which models are judged"
    )
    parser.add_argument("--resume", action="store_true", help="skip what has a result already")
    parser.add_argument("--workers", type=int, default=2, help="models at a time, one core each")
    parser.add_argument(
        "--time-limit", type=float, help="seconds after which to stop and resume later"
    )
    arguments = parser.parse_args()
    store.tidy()
    names = _names(arguments)
    wrong = done = 0
    judge = partial(judge_name, precision=arguments.precision)
    device = PRECISIONS[arguments.precision].device
    limits = Limits.of(device)
    for result in run_all(judge, names, arguments.workers, arguments.time_limit, limits):
        store.add(result, precision=arguments.precision)
        done += 1
        wrong += bool(result.wrong)
        _progress(done, len(names), result)
    store.tidy()
    store.note_environment(environment(device), arguments.precision)
    _write_page()
    print(f"{wrong} of {done} wrong; the table is docs/coverage.md")
    if done < len(names):
        print(f"{len(names) - done} are left for --resume")
    return 1 if wrong or done < len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
