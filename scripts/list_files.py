"""Write docs/files.md, each file of the package with the first paragraph of its docstring:
``python scripts/list_files.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lowmem_patch"
PAGE = ROOT / "docs" / "files.md"
_HEAD = """# Files

Each file of the package, in its own words. [Architecture](architecture.md) has the parts, their order, and
how they work together. `python scripts/list_files.py` writes this page.
"""


def page() -> str:
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    return "\n".join([_HEAD, *(line for folder in folders for line in _section(folder))])


def _section(folder: Path) -> Iterator[str]:
    yield f"## {folder.relative_to(ROOT)}/"
    yield ""
    of_all = _said(folder / "__init__.py")
    if of_all:
        yield of_all
        yield ""
    yield "| file | |"
    yield "|---|---|"
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"| `{path.name}` | {_said(path)} |"
    yield ""


def _said(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    words = " ".join(text.partition("\n\n")[0].split())
    return words.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
