"""The README shows the committed results and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_rendered_from_the_committed_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.render(text) == text, "run `python benchmarks/tables.py`"
    for name in tables.TABLES:
        start = text.partition(f"<!-- {name} -->\n")[2]
        assert start[:1] in ("|", "*"), f"table {name} is empty"
