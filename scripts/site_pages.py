"""A hook of mkdocs: files outside docs/ are pages of the site, and links between files lead to pages.

So each text stands once, where a reader of the repository looks for it.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# file of the repository -> page of the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    **{
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in sorted((ROOT / "examples").iterdir())
        if path.suffix in (".py", ".ipynb")
    },
}
FILES = {page: file for file, page in PAGES.items()}
# no pages, so that their names alone are shown
PLAIN = {"CITATION.cff", "LICENSE"}
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=_page(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text with links to files of the repository as links to pages of the site."""
    here = page.file.src_uri
    source = FILES.get(here, f"docs/{here}")
    markdown = re.sub(
        r"\[([^\]]*)\]\(([^)#\s]+)\)", lambda m: m[1] if m[2] in PLAIN else m[0], markdown
    )

    def target(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        there = PAGES.get(file, file.removeprefix("docs/"))
        return posixpath.relpath(there, posixpath.dirname(here) or ".")

    return LINK.sub(target, markdown)


def _page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.name}\n\n```python\n{text}```\n"
    if path.suffix == ".ipynb":
        return _notebook(path.name, json.loads(text))
    return text


def _notebook(name: str, notebook: dict[str, Any]) -> str:
    """Its text and its code, without outputs."""
    parts = [f"*This page is the notebook `examples/{name}`.*"]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    # its heading first
    return "\n\n".join([parts[1], parts[0], *parts[2:]]) + "\n"
