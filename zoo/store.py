"""Results on disk, one line of JSON each: a run that is ended at any moment loses no other result."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

from zoo.precision import FLOAT32, PRECISIONS
from zoo.result import Result

_ENVIRONMENTS = "environments.json"

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("transformers", "timm")
# messages of other libraries name files of this machine; their last part says enough
_FOLDERS = re.compile(r"(?<![\w.:/])(/[\w.+-]+)+/(?=[\w.+-])")


def library_of(name: str) -> str:
    return "timm" if name.startswith("timm/") else "transformers"


def _file(library: str, folder: Path, precision: str) -> Path:
    return folder / (
        f"{library}.jsonl" if precision == FLOAT32.name else f"{library}-{precision}.jsonl"
    )


def load(library: str, folder: Path = RESULTS, precision: str = FLOAT32.name) -> dict[str, Result]:
    """Results by name, the last line of each; a line that was cut off by a kill is passed over."""
    path = _file(library, folder, precision)
    found: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["name"]] = Result.from_dict(row)
    return dict(sorted(found.items()))


def line(result: Result, precision: str = FLOAT32.name) -> str:
    """One line of a file of results."""
    row = result.to_dict() if precision == FLOAT32.name else result.verdicts()
    text = json.dumps(row, sort_keys=True)
    return _FOLDERS.sub("", text) + "\n"


def add(result: Result, folder: Path = RESULTS, precision: str = FLOAT32.name) -> None:
    """Append one result."""
    folder.mkdir(exist_ok=True)
    path = _file(library_of(result.name), folder, precision)
    with path.open("a", encoding="utf-8") as file:
        file.write(line(result, precision))


def note_environment(environment: dict[str, str], precision: str, folder: Path = RESULTS) -> None:
    """Write down on which machine, and with which versions, the results of a precision were made."""
    found = {**environments(folder), precision: environment}
    text = json.dumps(found, indent=2, sort_keys=True) + "\n"
    (folder / _ENVIRONMENTS).write_text(text, encoding="utf-8")


def environments(folder: Path = RESULTS) -> dict[str, dict[str, str]]:
    """What :func:`note_environment` wrote, by precision."""
    path = folder / _ENVIRONMENTS
    found: dict[str, dict[str, str]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    )
    return found


def tidy(folder: Path = RESULTS) -> None:
    """One line for each name, sorted; before anything is appended, since a line may be cut off."""
    for library, precision in itertools.product(LIBRARIES, PRECISIONS):
        path = _file(library, folder, precision)
        if path.exists():
            whole = path.with_suffix(".new")
            results = load(library, folder, precision).values()
            lines = (line(result, precision) for result in results)
            whole.write_text("".join(lines), encoding="utf-8")
            os.replace(whole, path)
