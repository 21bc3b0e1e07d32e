"""The code of docs/trainers.md runs as it is pasted."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
BLOCKS = re.findall(r"^## (.*?)$|^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
CODE: dict[str, str] = {}
_heading = ""
for _title, _block in BLOCKS:
    _heading = _title or _heading
    if _block:
        CODE[_heading] = _block


def test_the_page_has_code_for_each_library() -> None:
    titles = {
        "transformers Trainer",
        "TRL",
        "sentence-transformers",
        "Lightning",
        "diffusers",
        "timm",
        "CUDA graphs",
    }
    assert set(CODE) == titles


@pytest.mark.filterwarnings("ignore")  # of the libraries, not of this page
@pytest.mark.parametrize("title", CODE)
def test_code_runs_as_pasted(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ast.walk(ast.parse(CODE[title])):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                pytest.skip(f"{name} is not installed: make test-integrations")
    monkeypatch.chdir(tmp_path)
    exec(compile(CODE[title], f"docs/trainers.md: {title}", "exec"), {"__name__": "pasted"})


def test_links_inside_the_page_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = [re.sub(r"[^\w -]", "", title) for title in re.findall(r"^## (.*)$", text, re.M)]
    anchors = {title.strip().lower().replace(" ", "-") for title in titles}
    links = set(re.findall(r"\(#([^)]*)\)", text))
    assert links and links <= anchors
    assert all((PAGE.parent / path).exists() for path in re.findall(r"\]\((\.\./[^)#]*)\)", text))
