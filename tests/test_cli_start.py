"""How long a command line waits before its work begins: what it imports, and the processor's time."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from lowmem_patch.cli.light_imports import light_imports, uncollected_imports
from tests.support.tiers import slow_but

ROOT = Path(__file__).parent.parent
TIMM = ROOT / "lowmem_patch/assets/tiny-vit"
RUN = """
import gc, json, runpy, sys
runs = []
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]))
try:
    runpy.run_module("lowmem_patch", run_name="__main__")
except SystemExit as stopped:
    found = {"code": stopped.code or 0, "modules": [*sys.modules], "searches": runs.count(2)}
    print(json.dumps(found), file=sys.stderr)
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16",
}  # fmt: skip


class Started(NamedTuple):
    """Of a command: the exit code, all imported modules, seconds of the processor, and how often the garbage
    collector began or ended a search of the oldest generation."""

    code: int
    modules: set[str]
    seconds: float
    searches: int


def children_seconds() -> float:
    """Of the processor, for all subprocesses up to now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def started(*arguments: str | Path) -> Started:
    before = children_seconds()
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    seconds = children_seconds() - before
    # Triton 3.9 reports leaks of its own when the interpreter ends, after our line
    found = json.loads(
        next(x for x in reversed(done.stderr.splitlines()) if x.startswith('{"code"'))
    )
    return Started(found["code"], set(found["modules"]), seconds, found["searches"])


def bare_seconds() -> float:
    """Of the processor, for the libraries of any command line; torch alone takes 18 times as long."""
    before = children_seconds()
    subprocess.run([sys.executable, "-c", "import typer.main, rich.console"], check=True)
    return children_seconds() - before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["inspect", "--help"], 0),
        (["inspect"], 2),
        (["bench", "--nope"], 2),
        (["inspect", "x", "--optimizer", "lion"], 2),
    ],
)
def test_what_needs_no_model_imports_no_torch(arguments: list[str], code: int) -> None:
    found = started(*arguments)
    assert found.code == code
    assert not {"torch", "transformers", "timm", "peft", "numpy"} & found.modules
    assert found.seconds <= max(0.4, 5 * bare_seconds())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("train", slow_but(["full", "lora"], "full"))
def test_a_look_at_a_config_imports_what_it_needs(folder: Path, train: str) -> None:
    found = started("inspect", folder, "--seq-len", "2048", "--train", train)
    assert found.code == 0
    assert not {"bitsandbytes", "torchvision", "sklearn", "timm", "matplotlib"} & found.modules
    # 5 on a machine that does nothing else; the processor's time, too, grows with its other guests
    assert found.seconds <= max(12, 120 * bare_seconds())
    # what is imported lies in the oldest generation: a search of it takes a second, and is two calls
    assert found.searches <= 6


def test_what_a_model_of_images_may_need_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "peft", "torchvision", "bitsandbytes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with light_imports(str(folder)):
        assert sys.modules["torchvision"] is sys.modules["bitsandbytes"] is None
    assert "torchvision" not in sys.modules
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vision_config": {}}))
    for model in (
        str(folder),
        str(TIMM),
        "timm/vit_tiny_patch16_224",
        "no/such-model",
        "no such / name",
    ):
        with light_imports(model):
            assert "torchvision" not in sys.modules and sys.modules["bitsandbytes"] is None


def test_nothing_is_hidden_from_libraries_that_are_there(folder: Path) -> None:
    import transformers  # noqa: F401

    before = dict(sys.modules)
    with light_imports(str(folder)):
        assert sys.modules == before


def test_the_collector_rests_until_the_imports_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", SimpleNamespace())
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with uncollected_imports() as done:
        assert not gc.isenabled()
        done()
        # stays so: thawed, the heap of all tests before would be walked again
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    assert gc.get_freeze_count() > frozen
    with pytest.raises(ZeroDivisionError), uncollected_imports():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_a_triton_that_tells_what_is_left_finds_all_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frozen objects are alive when a process ends, and nanobind prints a line for each of its own."""
    thawed: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    function = type("nb_func", (), {"__module__": "nanobind"})()
    for library, expected in (({}, []), ({"get": function}, [True])):
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", SimpleNamespace(**library))
        with uncollected_imports():
            pass
        assert thawed == expected
