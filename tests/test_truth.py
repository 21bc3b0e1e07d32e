"""``benchmarks/truth.py`` with tiny models: each task trains, in pairs; the statistics are right."""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "truth.py"
MODULES = ("truth", "truth_data", "truth_report", "truth_tasks")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Truth(NamedTuple):
    """The modules of the benchmark."""

    command: Any
    data: Any
    report: Any
    tasks: Any


@pytest.fixture(scope="module")
def truth() -> Iterator[Truth]:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        yield Truth(*map(importlib.import_module, MODULES))
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def runs(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes = truth.tasks.TRIAL
    try:
        data = truth.data.find_data(sizes.corpus)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = truth.tasks.Runs(data, sizes, "cpu", tmp_path_factory.mktemp("bases"))
    for base in truth.command.BASES:
        found.train_base(base)
    return found


TASKS = ("llama", "gpt2", "llama-lora", "gpt2-qkv", "vit", "roberta")


def test_all_tasks_are_tested(truth: Truth) -> None:
    assert tuple(truth.tasks.TASKS) == TASKS


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_and_its_runs_are_pairs(truth: Truth, runs: Any, task: str) -> None:
    def run(variant: str) -> dict[str, Any]:
        result: dict[str, Any] = runs.run(truth.tasks.Job(task, variant, 0))
        assert result["steps"] == round(3 * truth.tasks.TASKS[task].steps)
        assert math.isfinite(result["loss"]) and np.isfinite(result["curve"]).all()
        return result

    unpatched, again = run("unpatched"), run("unpatched")
    assert unpatched["loss"] == again["loss"], "the same weights and batches"
    halves, exact = run("unpatched, in halves"), run("exact")
    for other in (halves, exact):
        # a tenth of a bfloat16 rounding: the means of many losses
        assert other["loss"] == pytest.approx(unpatched["loss"], rel=2**-8 / 10)
    assert exact["approximate"] == 0 and exact["saved"][1] < exact["saved"][0]
    assert run("codes, 1 bit")["approximate"] == 1


def test_auto_uses_codes_where_nothing_behind_a_gelu_trains(truth: Truth, runs: Any) -> None:
    job = truth.tasks.Job
    assert runs.run(job("gpt2-qkv", "auto", 0))["approximate"] == 1
    assert runs.run(job("gpt2", "auto", 0))["approximate"] == 0


def test_seeds_differ_and_held_out_batches_do_not(truth: Truth, runs: Any) -> None:
    def first(seed: int) -> Any:
        task = truth.tasks.TASKS["llama"]
        return runs._batches(task, "train", 1, seed)(0)["input_ids"]

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))
    task = truth.tasks.TASKS["llama"]
    model = runs._model(task, 0)
    assert runs._held_out(model, task) == runs._held_out(model, task)


def test_files_that_are_held_out_are_not_trained_on(truth: Truth, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"module_{number}.py").write_text(f"<{number}>")
    split = truth.data._sources(tmp_path, 1000)
    train, held_out = (
        set(bytes(part.numpy()).decode().strip("<>").split("><"))
        for part in (split.train, split.held_out)
    )
    assert len(held_out) == 2 and not train & held_out and len(train | held_out) == 20


def test_paired_difference_with_known_numbers(truth: Truth) -> None:
    # of 1, 2, 3, 4, 5: mean 3, standard error sqrt(2.5 / 5), Student's quantile (4 degrees of freedom) 2.776
    found = truth.report.paired_difference([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3 and found.pairs == 5
    assert found.half_width == pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-6)
    assert found.clear
    assert not truth.report.paired_difference([1.0, -2.0, 3.0, -4.0, 5.0]).clear
    assert math.isnan(truth.report.paired_difference([1.0]).half_width)


def results_file(path: Path) -> Path:
    """Three seeds of two variants, of which the second has lost one."""
    header = {
        "environment": {"machine": "a machine", "date": "2026-01-01", "torch": "2"},
        "data": {"fingerprint": "0", "digits": "drawn", "packages": ["torch"]},
        "sizes": {},
    }
    losses = {"unpatched": (1.0, 2.0, 3.0), "exact": (1.5, 2.5, None), "paper": (1.25, 2.5, 3.75)}
    lines: list[dict[str, Any]] = [header]
    for variant, values in losses.items():
        for seed, loss in enumerate(values):
            job = {"task": "llama", "variant": variant, "seed": seed, "length": 1}
            curve = [4.0, 3.0, loss]
            lines.append(
                {**job, "error": "lost"}
                if loss is None
                else {**job, "steps": 60, "loss": loss, "curve": curve, "seconds": 1.0}
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_tables_pair_by_seed(truth: Truth, tmp_path: Path) -> None:
    text = truth.report.tables(truth.report.load(results_file(tmp_path / "results.jsonl")))
    assert "| unpatched, spread of seeds | 2.0000 ± 1.0000 (3 seeds) |" in text
    assert "| exact | **+0.5000 ± 0.0000** (2 seeds) |" in text
    # differences 0.25, 0.5, 0.75: standard error 0.25 / sqrt(3), quantile of 2 degrees of freedom 4.3027
    assert "| paper | +0.5000 ± 0.6210 |" in text
    assert "llama, exact: lost" in text


def test_the_picture_is_drawn(truth: Truth, tmp_path: Path) -> None:
    results = truth.report.load(results_file(tmp_path / "results.jsonl"))
    truth.report.draw(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_page_shows_the_committed_results(truth: Truth) -> None:
    found = sorted((ROOT / "benchmarks" / "results").glob("truth-*.jsonl"))
    if not found:
        pytest.skip("no results are committed")
    text = truth.report.PAGE.read_text(encoding="utf-8")
    again = truth.report.rendered(text, found[0])
    assert again == text, f"python benchmarks/truth.py --report {found[0].name}"


def test_whole_sets_of_variants_come_first(truth: Truth) -> None:
    jobs = truth.command.all_jobs(2, ["llama", "vit"], ["unpatched", "exact"])
    assert [job.seed for job in jobs] == [0] * 6 + [1] * 4
    assert [job.length for job in jobs] == [1] * 4 + [10] * 2 + [1] * 4


def test_the_command_goes_on_with_what_is_missing(truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "truth.jsonl"
    common = ["--devices", "0", "--workers", "1", "--seeds", "1", "--trial", "--tasks", "gpt2-qkv"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *common, "--variants", "unpatched"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = truth.report.load(out)
    assert [(run["variant"], run["loss"] > 0) for run in results.runs] == [("unpatched", True)]
    jobs = truth.command.all_jobs(1, ["gpt2-qkv"], ["unpatched", "exact"])
    finished = truth.command.checked_resume(out, results.header)
    assert truth.command.missing(jobs, finished, out.with_suffix(".bases")) == jobs[1:]


class Ended:
    """A process whose pipe is closed, or that reports a lost device and ends."""

    exitcode = -11

    def join(self) -> None:
        pass


@pytest.mark.parametrize("answer", [None, {"error": "AcceleratorError: CUDA error: unspecified"}])
def test_a_process_that_is_lost_is_replaced(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str] | None
) -> None:
    command = truth.command
    ours, theirs = multiprocessing.Pipe()
    first = command.Worker("cpu", Ended(), ours, job=truth.tasks.Job("vit", "exact", 0))
    second = command.Worker("cpu", None, multiprocessing.Pipe()[0])
    started = iter([first, second])
    monkeypatch.setattr(command.Pool, "_started", lambda *_: next(started))
    pool = command.Pool(["cpu"], ("", ""), truth.tasks.TRIAL)
    if answer is not None:
        theirs.send(answer)
    theirs.close()
    ((job, found),) = pool.answers(1.0)
    assert (job.task, pool.workers) == ("vit", [second])
    assert found == (answer or {"error": "the process ended with -11"})


def test_no_file_is_written_over_and_other_data_are_refused(truth: Truth, tmp_path: Path) -> None:
    out = results_file(tmp_path / "results.jsonl")
    header = truth.report.load(out).header
    with pytest.raises(SystemExit, match="exists"):
        truth.command.new_file(out, header)
    job = truth.tasks.Job
    done = truth.command.checked_resume(out, header)
    assert job("llama", "exact", 1) in done and job("llama", "exact", 2) not in done
    with pytest.raises(SystemExit, match="other data"):
        truth.command.checked_resume(out, header | {"data": header["data"] | {"fingerprint": "1"}})


def test_adapters_wait_for_their_base_and_are_left_alone_without_it(
    truth: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = truth.tasks.Job
    jobs = [job("vit", "exact", 0), job("llama-lora", "exact", 0)]
    assert truth.command.missing(jobs, set(), tmp_path) == ["llama", *jobs]
    done = {job("llama-lora", "unpatched", 0)}
    assert truth.command.missing(jobs, done, tmp_path) == jobs[:1]
    assert "llama-lora: left alone" in capsys.readouterr().out
    truth.tasks.base_path(tmp_path, "llama").touch()
    assert truth.command.missing(jobs, done, tmp_path) == jobs
