"""``lowmem-patch run``: unmodified scripts train the same in fewer bytes, and nothing stays behind."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import timm
import torch
import transformers
from typer.testing import CliRunner

from lowmem_patch.cli import app
from lowmem_patch.errors import ConfigError, TraceError
from lowmem_patch.integrations import LowmemTrainerCallback
from lowmem_patch.integrations.script import ScriptPatching, run_script
from tests.integrations.trainings import SEVERAL_PROCESSES
from tests.support.judge import TOLERANCE, assert_close
from tests.support.versions import before

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PROCESS_TIMEOUT = 240

pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step()`:UserWarning",
    "ignore:.*pin_memory.*no accelerator is found:UserWarning",
)


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's folder takes the first place of the search path, which must not be the repository's."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(SCRIPTS))


def unpatched(name: str, out: Path, *arguments: str) -> Any:
    before, sys.argv = sys.argv, [name, "--out", str(out), *arguments]
    try:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    except SystemExit:
        pass
    finally:
        sys.argv = before
    return torch.load(out)


def patched(name: str, out: Path, *arguments: str, preset: Any = "exact") -> Any:
    patching = ScriptPatching(preset, strict=True)
    try:
        run_script(str(SCRIPTS / name), ["--out", str(out), *arguments], patching)
    except SystemExit as end:
        assert end.code == 7
    return torch.load(out)


def assert_same(found: Any, expected: Any) -> None:
    """Two trainings in float64."""
    assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), "losses")
    assert list(found["weights"]) == list(expected["weights"])
    for key, value in expected["weights"].items():
        assert_close(found["weights"][key].double(), value.double(), key, 10 * TOLERANCE)


@pytest.mark.parametrize("name", ["timm_loop.py", "accelerate_loop.py", "trainer_script.py"])
def test_a_script_trains_the_same_in_fewer_bytes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = unpatched(name, tmp_path / "own.pt")
    found = patched(name, tmp_path / "patched.pt")
    assert_same(found, expected)
    assert found["saved"] < expected["saved"]
    text = capsys.readouterr().err
    assert "in this process alone" in text and "1 model patched: " in text
    assert text.count("saved activation bytes") == 1, "the report was said once"
    assert text.count("; give --batch-size") == (name != "trainer_script.py")


def test_layers_frozen_after_create_model_are_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="frozen now.*call patch_model"):
        found = patched("timm_loop.py", tmp_path / "patched.pt", "--freeze")
    assert_same(found, unpatched("timm_loop.py", tmp_path / "own.pt", "--freeze"))


def test_the_libraries_are_as_they_were(tmp_path: Path) -> None:
    from timm.models import _factory

    owners = [
        (transformers.Trainer, "__init__"), (accelerate.Accelerator, "prepare"), (timm, "create_model"),
        (timm.models, "create_model"), (_factory, "create_model"),
    ]  # fmt: skip
    before = [getattr(*owner) for owner in owners]
    state = sys.argv, list(sys.path), list(sys.meta_path)
    patched("timm_loop.py", tmp_path / "out.pt")
    assert [getattr(*owner) for owner in owners] == before
    assert (sys.argv, sys.path, sys.meta_path) == state


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_the_libraries_are_put_back_after_an_error(tmp_path: Path) -> None:
    before = timm.create_model
    with pytest.raises(ZeroDivisionError):
        run_script(script(tmp_path, "1 / 0"), [], ScriptPatching())
    assert timm.create_model is before


def test_that_nothing_was_patched_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import sys, timm\nprint(sys.argv[1:], __name__)"
    run_script(script(tmp_path, text), ["-x"], ScriptPatching())
    output = capsys.readouterr()
    assert output.out == "['-x'] __main__\n"
    assert "nothing was patched" in output.err and "lowmem_patch.patch_model(model)" in output.err


UNKNOWN = """
import torch, accelerate
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU(), torch.nn.Linear(2, 2))
accelerate.Accelerator(cpu=True).prepare(model)
print("done")
"""


def test_a_model_that_cannot_be_patched_is_left_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(script(tmp_path, UNKNOWN), [], ScriptPatching())
    output = capsys.readouterr()
    assert output.out == "done\n"
    assert "nothing was patched by this command: Sequential is left as it is" in output.err
    assert "example_inputs=" in output.err


def test_strict_ends_the_script_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError):
        run_script(script(tmp_path, UNKNOWN), [], ScriptPatching(strict=True))
    assert "done" not in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "raise SystemExit(5)"], ids=repr)
def test_strict_wants_a_patched_model(tmp_path: Path, ending: str) -> None:
    nothing = script(tmp_path, ending)
    codes = [
        CliRunner().invoke(app, ["run", *options, nothing]).exit_code
        for options in ([], ["--strict"])
    ]
    assert codes == ([5, 5] if "5" in ending else [0, 3])


@pytest.mark.skipif(before("transformers", "5.7"), reason="an argument of transformers since 5.6")
def test_what_cannot_be_combined_ends_the_script(tmp_path: Path) -> None:
    text = """
from transformers import Trainer, TrainingArguments
from tests.support.models import llama
Trainer(llama(), TrainingArguments(output_dir="unused", use_cpu=True, activation_checkpointing=True))
"""
    patching = ScriptPatching(fit="24GiB", sequence_length=8)
    with pytest.raises(ConfigError, match="leave fit out"):
        run_script(script(tmp_path, text), [], patching)


def test_a_callback_of_the_script_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""
from transformers import Trainer, TrainingArguments
from lowmem_patch import patch_report
from lowmem_patch.integrations import LowmemTrainerCallback
from tests.support.models import llama
args = TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to=[])
trainer = Trainer(llama(), args, callbacks=[LowmemTrainerCallback("auto")])
assert len(trainer.callback_handler.callbacks) == len(set(map(type, trainer.callback_handler.callbacks)))
print(patch_report(trainer.model).config.name)
"""
    run_script(script(tmp_path, text), [], ScriptPatching("exact", "1MiB"))
    output = capsys.readouterr()
    assert output.out == "auto\n"
    own = "a callback of its own that patches: the options of this command are not used"
    assert output.err.count(own) == 2  # when it is met, and in the end


def test_a_timm_model_inside_transformers_is_left_to_its_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification
config = TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=2, model_args={"depth": 1})
TimmWrapperForImageClassification(config)
"""
    run_script(script(tmp_path, text), [], ScriptPatching())
    assert "nothing was patched" in capsys.readouterr().err


def test_a_module_is_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_module.py").write_text("import sys\nprint(sys.argv[1:], __name__)")
    monkeypatch.chdir(tmp_path)
    run_script("some_module", ["--x", "1"], ScriptPatching(), as_module=True)
    assert capsys.readouterr().out == "['--x', '1'] __main__\n"


def test_the_command_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(app, ["run", str(tmp_path / "none.py")])
    assert missing.exit_code == 2 and "there is no script" in missing.stderr
    module = runner.invoke(app, ["run", "-m", "no_such_package.train"])
    assert module.exit_code == 2 and "there is no module no_such_package.train" in module.stderr
    inner = runner.invoke(app, ["run", "-m", "json.no_such_module"])
    assert inner.exit_code == 2 and "there is no module json.no_such_module" in inner.stderr
    preset = runner.invoke(app, ["run", "--preset", "nonsense", script(tmp_path, "pass")])
    assert preset.exit_code == 2 and "unknown preset" in preset.stderr


TRAINER = """
import sys
from transformers import Trainer, TrainingArguments
from tests.support.models import llama
Trainer(llama(), TrainingArguments("unused", use_cpu=True, report_to=[]))
"""


def test_a_length_that_no_trainer_tells_is_asked_for_in_one_line(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINER)
    asked = CliRunner().invoke(app, ["run", "--fit", "24GiB", path])
    assert asked.exit_code == 2, asked.output
    line = asked.stderr.strip().splitlines()[-1]
    assert line.startswith("error: fit='24GiB' needs the size of a training step")
    assert line.endswith("give --seq-len before the script (script.py, line 5)")
    assert "Traceback" not in asked.output and "nothing was patched" not in asked.stderr
    told = CliRunner().invoke(app, ["run", "--fit", "24GiB", "--seq-len", "16", path])
    assert told.exit_code == 0 and "1 model patched" in told.stderr


def test_too_small_a_budget_names_the_line_ahead_of_what_helps(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINER)
    found = CliRunner().invoke(app, ["run", "--fit", "1KiB", "--seq-len", "16", path])
    assert found.exit_code == 4, found.output
    lines = found.stderr[found.stderr.index("error: ") :].strip().splitlines()
    assert lines[0].endswith("(script.py, line 5)") and len(lines) > 2
    assert not any("script.py" in line for line in lines[1:])


def test_a_budget_without_a_unit_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["run", "--fit", "24", script(tmp_path, "print('ran')")])
    assert found.exit_code == 2 and "24GiB" in found.stderr and "ran" not in found.stdout
    with pytest.raises(ConfigError, match="24GiB"):
        LowmemTrainerCallback(fit="24")


def test_options_behind_the_script_are_named_unless_it_has_them(tmp_path: Path) -> None:
    late = ["--preset", "exact", "--seq-len=8", "--epochs", "3"]
    plain = CliRunner().invoke(
        app, ["run", script(tmp_path, "import sys; print(sys.argv[1:])"), *late]
    )
    assert str(late) in plain.stdout
    notes = [line for line in plain.stderr.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == ["--preset", "--seq-len"]
    assert "options of run stand before, as in lowmem-patch run --preset ... script.py" in notes[0]
    parses = "parser.add_argument('--preset')"
    fields = "class Arguments:\n    seq_len: int = 1"
    own = script(tmp_path, f"if False:\n    {parses}\n{fields}")
    assert "note: " not in CliRunner().invoke(app, ["run", own, *late]).stderr


def launched(*command: str | Path, code: int = 0, **environment: str) -> str:
    """What a command writes to standard error, run in processes of its own."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=PROCESS_TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Where the libraries are imported by the script, and not before."""
    text = launched(
        "-m", "lowmem_patch", "run", "--preset", "exact", SCRIPTS / "trainer_script.py",
        "--out", tmp_path / "found.pt", code=7,
    )  # fmt: skip
    assert "1 model patched" in text and "ViTForImageClassification, preset exact" in text
    found = torch.load(tmp_path / "found.pt")
    assert_same(found, unpatched("trainer_script.py", tmp_path / "own.pt"))


FSDP2 = (
    "-m", "accelerate.commands.launch", "--num-processes", "2", "--num-machines", "1",
    "--main-process-port", "0", "--mixed-precision", "no", "--dynamo-backend", "no", "--use-fsdp",
    "--fsdp-version", "2", "--fsdp-auto-wrap-policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp-transformer-layer-cls-to-wrap", "ViTLayer", "--fsdp-state-dict-type", "FULL_STATE_DICT",
)  # fmt: skip
LAUNCHES = {
    "ddp": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "fsdp2": FSDP2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["forked", *(pytest.param(way, marks=SEVERAL_PROCESSES) for way in LAUNCHES)]
)
def test_two_processes_train_as_they_did(tmp_path: Path, way: str) -> None:
    outs = {preset: tmp_path / f"{preset}.pt" for preset in (None, "exact")}
    if way == "forked":
        texts = [launched(SCRIPTS / "forked.py", *outs.values())]
    else:
        script = [SCRIPTS / "accelerate_loop.py", *(["--fsdp2"] if way == "fsdp2" else [])]
        run = ("-m", "lowmem_patch", "run", "--preset", "exact", "--strict")
        texts = [
            launched(*LAUNCHES[way], *(run if preset else ()), *script, "--out", out)
            for preset, out in outs.items()
        ]
    said = [text.count("1 model patched") for text in texts]
    assert said in ([1], [0, 1]), "said by the first process alone"
    results = {preset: torch.load(out) for preset, out in outs.items()}
    for result in results.values():
        assert result["kind"] == ("FSDP2 of 2" if way == "fsdp2" else "MULTI_CPU of 2")
    assert_same(results["exact"], results[None])
    # the bytes of one process alone, whose rows are as many
    before, after = (
        run("accelerate_loop.py", tmp_path / "alone.pt")["saved"] for run in (unpatched, patched)
    )
    assert results[None]["saved"] == before > after
    # a norm that saves z copies gamma and beta, 32 numbers each: the last one, and under FSDP2 all
    more = (5 if way == "fsdp2" else 1) * 2 * 32 * 8
    assert results["exact"]["saved"] == after + more
