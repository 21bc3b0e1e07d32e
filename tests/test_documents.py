"""What the documents show is so: tables, code, links, and every message of the troubleshooting page."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

import lowmem_patch
from lowmem_patch import errors
from lowmem_patch.cli import app
from lowmem_patch.config import CHOICES, PatchConfig, preset_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE_PAGES = [
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
    ROOT / "examples" / "README.md",
]
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_of(name: str) -> str:
    """All Python code of a page, as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text_of(name), re.S | re.M))


def run(name: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code_of(name), name, "exec"), names)
    return names


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_every_file_of_the_package_is_listed() -> None:
    page = script("scripts/list_files.py").page()
    assert text_of("docs/files.md") == page, "run `python scripts/list_files.py`"
    assert "|  |" not in page, "a file has no docstring"


def test_tables_are_rendered_from_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = script("benchmarks/tables.py")
    texts = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    for text in texts:
        assert tables.render(text) == text, "run `python benchmarks/tables.py`"
    for name in tables.TABLES:
        start = "".join(texts).partition(f"<!-- {name} -->\n")[2]
        assert start[:1] in ("|", "*"), f"table {name} is empty"


def test_the_readme_is_short() -> None:
    assert text_of("README.md").count("\n") <= 150


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_page_is_in_the_navigation() -> None:
    listed = text_of("mkdocs.yml")
    assert not [page.name for page in PAGES[1:] if f": {page.name}" not in listed]


@pytest.mark.filterwarnings("ignore")  # of the libraries, not of this page
def test_the_readme_runs_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("README.md", {"__name__": "pasted"})
    assert 0 < names["after"].activations < names["before"].activations
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    shown = capsys.readouterr().out
    assert "sites patched" in shown
    last = shown.splitlines()[-1]
    assert last.startswith("measured: ") and f"\n# {last}\n" in text_of("README.md")


@pytest.mark.filterwarnings("ignore")
def test_the_tutorial_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    peft: Any = pytest.importorskip("peft")
    safetensors: Any = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    names = run("docs/tutorial.md", {"__name__": "pasted"})
    assert 0 < names["after"].activations < names["before"].activations
    assert names["trainer"].state.global_step == 10
    trained = safetensors.load_file("lora-out/adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(names["stock"])
    assert trained.keys() == loaded.keys()
    assert all(bool((trained[key] == loaded[key]).all()) for key in trained)
    assert any(bool(value.any()) for key, value in trained.items() if "lora_B" in key)
    assert all(parameter.grad is not None for parameter in names["merged"].parameters())
    assert not any("lora" in key for key in safetensors.load_file("merged-out/model.safetensors"))


def test_the_presets_page_runs() -> None:
    from transformers import AutoModelForCausalLM

    from lowmem_patch.demo import LLAMA_FOLDER

    model = AutoModelForCausalLM.from_pretrained(LLAMA_FOLDER)
    names = run(
        "docs/presets.md", {"model": model, "batch": {"input_ids": torch.ones(2, 8).long()}}
    )
    assert names["three_bits"].bits == 3


def literals() -> list[str]:
    """Every piece of text in the package's code, as it stands between formatted values."""
    return [
        node.value
        for path in (ROOT / "lowmem_patch").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    known = literals()
    messages = re.findall(r"^\| `([^`]*)` \|", TROUBLE, re.M)
    assert len(messages) > 60
    pieces = {p.strip() for m in messages for p in m.split("…") if len(p.strip()) > 3}
    assert not [piece for piece in pieces if not any(piece in text for text in known)]


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_its_paragraph(name: str) -> None:
    assert f"\n## {name}\n" in TROUBLE


def test_every_preset_and_key_is_on_its_page() -> None:
    page = text_of("docs/presets.md")
    names = {field.name for field in dataclasses.fields(PatchConfig)} - {"name"}
    words = [*preset_names(), *names, *(value for values in CHOICES.values() for value in values)]
    assert not [word for word in words if f"`{word}`" not in page]


def test_every_command_is_on_its_page() -> None:
    page = text_of("docs/commands.md")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert commands and not [name for name in commands if f"| `{name}" not in page]


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = text_of("docs/api.md")
    names = {*lowmem_patch.__all__} - {*errors.__all__, "__version__"}
    assert not [name for name in names if not re.search(rf"\b{name}\b", page)]


def test_signatures_on_the_page_of_the_api_are_the_real_ones() -> None:
    page = " ".join(text_of("docs/api.md").split())
    calls = (
        "patch_model",
        "plan_patch",
        "patch_report",
        "unpatch_model",
        "saved_bytes",
        "verify_model",
    )
    for name in calls:
        signature = inspect.signature(getattr(lowmem_patch, name))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        assert f"{name}{inspect.Signature(bare)}" in page
    arguments = inspect.signature(lowmem_patch.patch_model).parameters
    assert not [argument for argument in arguments if f"| `{argument}` |" not in page]


def test_one_version_everywhere() -> None:
    version = lowmem_patch.__version__
    assert f"\nversion: {version}\n" in text_of("CITATION.cff")
    assert f"\n## [{version}] - 20" in text_of("CHANGELOG.md")


def test_the_workflow_runs_every_set_of_versions() -> None:
    jobs = yaml.safe_load(text_of(".github/workflows/tests.yml"))["jobs"]
    run = {row["versions"] for row in jobs["tests"]["strategy"]["matrix"]["include"]}
    kept = {path.stem for path in (ROOT / "constraints").glob("*.txt")}
    assert run == kept - {"integrations", "llamafactory"}  # which add to the tested set
    targets = {row["target"] for row in jobs["tests"]["strategy"]["matrix"]["include"]}
    assert all(f"\n{target}:" in text_of("Makefile") for target in targets)
