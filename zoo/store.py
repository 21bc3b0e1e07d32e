"""Results on disk, one line of JSON each: a run that is ended at any moment loses no other result."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from zoo.result import Result

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("transformers", "timm")
# messages of other libraries name files of this machine; their last part says enough
_FOLDERS = re.compile(r"(?<![\w.:/])(/[\w.+-]+)+/(?=[\w.+-])")


def library_of(name: str) -> str:
    return "timm" if name.startswith("timm/") else "transformers"


def _file(library: str, folder: Path) -> Path:
    return folder / f"{library}.jsonl"


def load(library: str, folder: Path = RESULTS) -> dict[str, Result]:
    """Results by name, the last line of each; a line that was cut off by a kill is passed over."""
    path = _file(library, folder)
    found: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["name"]] = Result.from_dict(row)
    return dict(sorted(found.items()))


def _line(result: Result) -> str:
    text = json.dumps(result.to_dict(), sort_keys=True)
    return _FOLDERS.sub("", text) + "\n"


def add(result: Result, folder: Path = RESULTS) -> None:
    """Append one result."""
    folder.mkdir(exist_ok=True)
    with _file(library_of(result.name), folder).open("a", encoding="utf-8") as file:
        file.write(_line(result))


def tidy(folder: Path = RESULTS) -> None:
    """One line for each name, sorted; before anything is appended, since a line may be cut off."""
    for library in LIBRARIES:
        path = _file(library, folder)
        if path.exists():
            whole = path.with_suffix(".new")
            lines = (_line(result) for result in load(library, folder).values())
            whole.write_text("".join(lines), encoding="utf-8")
            os.replace(whole, path)
