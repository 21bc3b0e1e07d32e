"""What commands print is whole at any width: no line is longer, no number is cut, each reason stands once."""

from __future__ import annotations

import importlib
import io
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lowmem_patch import demo, plan_patch, report
from lowmem_patch.cli import app
from lowmem_patch.planning.columns import Table, make_table, shortened, text_width
from lowmem_patch.report import layout, results

LLAMA, VIT = str(demo.LLAMA_FOLDER), str(demo.VIT_FOLDER)
SHORT = ("--seq-len", "16")
# a number with its unit, that is no part of a name
NUMBER = re.compile(r"(?<![\w.{[/-])-?\d[\d,.]*(?:e[-+]\d+)?(?: (?:[KMGT]iB|B|%)|x)?(?![\w}\]/.-])")
WIDTHS = (60, 80)
Printed = list[tuple[str, Callable[[], None]]]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What is printed, to be printed again at another width: a command runs once."""
    again: Printed = []
    rooms = [f"lowmem_patch.report.{room.name}" for room in pkgutil.iter_modules(report.__path__)]
    for room in rooms:
        importlib.import_module(room)  # before anything is replaced that they take
    for name in ("print_line", "print_table", "print_title"):
        real: Any = getattr(layout, name)

        def record(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> None:
            again.append((_name, lambda: _real(*args, **kwargs)))

        for room in rooms:
            monkeypatch.setattr(f"{room}.{name}", record, raising=False)
    return again


def at(width: int, calls: Printed, monkeypatch: pytest.MonkeyPatch, kind: str = "") -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    for name, call in calls:
        if name.startswith(kind):
            call()
    monkeypatch.undo()
    return stream.getvalue()


COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "SHALLOW", *SHORT, "--memory", "1GiB", "--preset", "paper"),
    "inspect, lora": ("inspect", LLAMA, *SHORT, "--train", "lora"),
    "inspect, vit": ("inspect", VIT, "--autocast"),
    "verify": ("verify", VIT, "--dtype", "float32", "--no-autocast"),
    "profile": ("profile", LLAMA, *SHORT, "--device", "cpu"),
    "bench": (
        "bench", LLAMA, *SHORT, "--rounds", "2", "--steps", "1", "--batch-size", "1", "--device", "cpu",
        "--variants", "unpatched,auto,liger,auto+checkpointing",
    ),
    "convert": ("convert", LLAMA, "OUT", "--dry-run"),
    "tables fit": ("tables", "fit", "mish", "--bits", "3"),
    "tables list": ("tables", "list"),
    "demo": ("demo",),
}  # fmt: skip


def shallow(folder: Path) -> Path:
    """The bundled LLaMA's config, with one layer: what fits is found by many steps."""
    config = json.loads((demo.LLAMA_FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_and_no_number_is_cut(
    name: str, printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "demo":
        task = demo.demo_tasks()[1]
        monkeypatch.setattr(demo, "demo_tasks", lambda: [task])
        monkeypatch.setattr("lowmem_patch.cli.demo._STEPS", 1)
    paths = {"OUT": str(tmp_path / "out"), "SHALLOW": str(shallow(tmp_path))}
    arguments = [paths.get(argument, argument) for argument in COMMANDS[name]]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert any(kind == "print_table" for kind, _ in printed)
    whole = at(10_000, printed, monkeypatch, "print_table")
    assert NUMBER.findall(whole) or name == "convert"
    for width in WIDTHS:
        lines = at(width, printed, monkeypatch).splitlines()
        assert max(map(len, lines)) <= width
        narrow = at(width, printed, monkeypatch, "print_table")
        # a number that stands in a label may have gone with the label's middle
        assert set(NUMBER.findall(whole)) <= set(NUMBER.findall(narrow))
        for mark in set(re.findall(r"^\[\d+\] .*", whole, re.M)):
            assert narrow.count(f"\n{mark[:12]}") == 1


def test_columns_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in WIDTHS:
        result = CliRunner().invoke(app, ["tables", "list"], env={"COLUMNS": str(width)})
        assert max(map(len, result.stdout.splitlines())) <= width
    monkeypatch.delenv("COLUMNS", raising=False)
    assert text_width(io.StringIO()) is None  # a file's lines are as long as their sentences
    monkeypatch.setenv("COLUMNS", "77")
    assert text_width(io.StringIO()) == 77


def test_in_a_file_names_are_whole() -> None:
    table = make_table("site", "strategy", "before", "after", "why", right=("before", "after"))
    name = f"encoder.layer.{'inner.' * 20}output.LayerNorm"
    table.add_row(name, "share", "8.0 MiB", "4.0 KiB", note="because")
    assert any(line.text.startswith(f"{name} ") for line in table.lines(None))
    assert not any(name in line.text for line in table.lines(100))


def drawn(table: Table, width: int | None) -> str:
    return "\n".join(line.text for line in table.lines(width))


def wide() -> Table:
    table = make_table("site", "kind", "before", "after", "why", right=["before", "after"])
    for number in (3, 10):
        name = f"base_model.model.model.layers.{number}.post_attention_layernorm"
        table.add_row(name, "rms_norm", "1,234.5 MiB", "678.9 KiB", note="the same reason")
    table.add_row("base_model.model.model.norm", "rms_norm", "1.5 MiB", "0 B", note="another one")
    return table


def test_a_prefix_goes_first_and_names_are_told_apart() -> None:
    text = drawn(wide(), 80)
    assert "site in base_model.model.model" in text
    assert "layers.10.post_attention_layernorm" in text and "..." not in text
    narrow = drawn(wide(), 50)
    rows = [line.split()[0] for line in narrow.splitlines() if "..." in line]
    assert len(set(rows)) == 2 and "1,234.5 MiB" in narrow


def test_columns_without_room_stand_in_a_table_of_their_own() -> None:
    text = drawn(wide(), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert "1,234.5 MiB" in text and "678.9 KiB" in text and text.count("site in") >= 2
    assert drawn(wide(), None).splitlines()[-2:] == ["[1] the same reason", "[2] another one"]


def test_the_end_of_a_name_says_more() -> None:
    assert shortened("model.layers.0.mlp", 18) == "model.layers.0.mlp"
    assert shortened("model.layers.0.mlp", 12) == "mod....0.mlp"


def test_a_report_is_printed_as_the_command_line_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_patch(transformers.AutoModelForCausalLM.from_pretrained(LLAMA))
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        print(found)
        by_print = capsys.readouterr().out
        results.print_plan(found, "title")
        by_command = capsys.readouterr().out
        assert max(map(len, by_print.splitlines())) <= width
        table = found.site_table().lines(width)
        assert len(table) > 5
        for text in (by_print, by_command):
            assert "\n".join(line.text for line in table) in text


def test_each_row_says_what_it_is(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row begins with dots or a number, or has a name of which little is left."""
    result = CliRunner().invoke(app, COMMANDS["inspect, lora"])
    assert result.exit_code == 0, result.output
    for width in (60, 80, 120):
        shown = at(width, printed, monkeypatch)
        rows = [x for x in shown.splitlines() if re.search(r"\d [KM]?i?B( |$)", x)]
        assert len(rows) > 20
        for row in rows:
            name = row.split("  ")[0]
            assert re.match(r"[a-z_]{3}", name) and len(name.replace(".", "")) >= 4, row


def test_the_shape_stands_beside_the_bytes() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA)
    made = " ".join(str(plan_patch(model)).split())
    assert "bytes are for input_ids 2x16, a small example made from the config" in made
    assert "fewer) for input_ids 2x16, a small example" in made
    given = " ".join(str(plan_patch(model, example_inputs=torch.zeros(3, 24).long())).split())
    assert (
        "bytes are for input 0 3x24, and a tensor that a Linear saves" in given
        and "small example" not in given
    )
    shown = CliRunner().invoke(app, ["inspect", LLAMA, *SHORT], env={"COLUMNS": "300"}).stdout
    assert "bytes are for input_ids 2x16, and" in shown
