"""JSON of every command, also of errors; notes on options that do nothing; the spinner."""

from __future__ import annotations

import io
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import lowmem_patch
from lowmem_patch import demo
from lowmem_patch.cli import app
from lowmem_patch.cli.runtime import JSON_SCHEMA, quiet_libraries
from lowmem_patch.report import layout

LLAMA, VIT = demo.LLAMA_FOLDER, demo.VIT_FOLDER


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def head_of(result: Result) -> Any:
    data = json.loads(result.stdout)
    assert data["schema"] == JSON_SCHEMA and data["version"] == lowmem_patch.__version__
    return data


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("inspect", "absent/model/x"), "CheckpointError", "absent/model/x"),
        (("verify", LLAMA, "--preset", "fastest"), "ConfigError", "fastest"),
        (("profile", LLAMA, "--train", "qlora"), "ConfigError", "4-bit"),
        (("bench",), "ConfigError", "--shape"),
        (("convert", LLAMA, LLAMA), "CheckpointError", "in each other"),
        (("tables", "fit", "exp(x)"), "FitError", "no limit"),
        (("inspect",), "UsageError", "MODEL"),
        (("inspect", LLAMA, "--optimizer", "lion"), "UsageError", "lion"),
    ],
)
def test_an_error_is_json_as_well(arguments: tuple[Any, ...], kind: str, text: str) -> None:
    result = call(*arguments, "--json")
    assert result.exit_code == 2
    error = head_of(result)["error"]
    assert error["type"] == kind and error["exit_code"] == 2 and text in error["message"]
    assert text in result.stderr
    assert call(*arguments).stdout == ""


@pytest.mark.parametrize("arguments", [("env",), ("tables", "list"), ("tables", "fit", "relu")])
def test_every_result_names_schema_and_version(arguments: tuple[str, ...]) -> None:
    assert set(head_of(call(*arguments, "--json"))) > {"schema", "version"}


@pytest.mark.slow
def test_options_that_do_nothing_are_named(tmp_path: Path) -> None:
    for arguments, name in (
        (("inspect", VIT, "--seq-len", "8"), "--seq-len"),
        (("inspect", LLAMA, "--seq-len", "8", "--lora-rank", "8"), "--lora-rank"),
        (("convert", LLAMA, tmp_path / "out", "--dry-run", "--overwrite"), "--overwrite"),
    ):
        result = call(*arguments, "--json")
        assert result.exit_code == 0 and head_of(result)
        notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
        assert len(notes) == 1 and f"{name} does nothing here" in notes[0]
    assert "note:" not in call("inspect", LLAMA, "--seq-len", "8", "--train", "lora").stderr


def test_each_command_has_an_example() -> None:
    root: Any = typer.main.get_command(app)
    commands = {**root.commands, **root.commands["tables"].commands}
    for name in commands.keys() - {"tables"}:
        group = ("tables",) if name in root.commands["tables"].commands else ()
        text = " ".join(call(*group, name, "--help").stdout.split())
        assert f"Example: lowmem-patch {' '.join((*group, name))}" in text


def test_the_presets_complete() -> None:
    completed = CliRunner().invoke(
        app, [], prog_name="lowmem-patch",
        env={"_LOWMEM_PATCH_COMPLETE": "complete_bash", "COMP_CWORD": "3",
             "COMP_WORDS": "lowmem-patch inspect --preset "},
    )  # fmt: skip
    assert {"auto", "exact", "paper"} <= set(completed.stdout.split())


def test_libraries_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_libraries():
        warnings.warn("of a library", UserWarning, stacklevel=1)
        logging.getLogger("some.library").warning("no module named kernels")
    logging.getLogger("some.library").warning("said again")
    err = capfd.readouterr().err
    assert "of a library" not in err and "kernels" not in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_spinner_is_for_terminals_and_ends_before_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with layout.spinner("tracing"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with layout.spinner("tracing"):
        time.sleep(0.2)
        assert "tracing" in terminal.getvalue()
        layout.print_line("result")
        shown = terminal.getvalue()
        time.sleep(0.3)
        assert terminal.getvalue() == shown
