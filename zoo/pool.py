"""One process for each model, several at a time: what a model breaks, leaks or fills dies with it.

Processes are forked from a server that has imported the libraries already. A model that exceeds its
processor time, its memory or a generous time on the clock is ended, and its result says so.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import transformers

from zoo.result import Result


def quiet_worker() -> None:
    """What a worker begins with: one thread, no warnings, no log."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one model: seconds of one core, and bytes of data."""

    seconds: int = 60
    memory: int | None = 5 * 2**30

    @classmethod
    def of(cls, device: str) -> Limits:
        """Those of a device: a GPU's driver maps far more than a model needs, so nothing bounds it there."""
        return cls() if device == "cpu" else cls(memory=None)


_CLOCK = 6  # times the seconds: for a machine whose cores are shared, or a process that sleeps
_PRELOADED = ["zoo.run", "transformers.modeling_layers", "transformers.loss.loss_utils"]

Judge = Callable[[str], Result]


class _TooSlow(BaseException):
    """Not an Exception: nothing on the way may take it for a refusal."""


def _stop(*_: Any) -> None:
    raise _TooSlow


def _work(judge: Judge, name: str, limits: Limits, sender: connection.Connection) -> None:
    if limits.memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
    # in code that does not come back to Python the signal waits, and the hard limit ends the process
    resource.setrlimit(resource.RLIMIT_CPU, (2 * limits.seconds, 2 * limits.seconds))
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    try:
        result = judge(name)
    except _TooSlow:
        result = Result(name, "slow", f"takes longer than {limits.seconds} s of one core")
    except MemoryError:
        bound = "there is" if limits.memory is None else f"{limits.memory / 2**30:g} GiB"
        result = Result(name, "too large", f"needs more than {bound}")
    except Exception as error:  # the zoo's own failure: it must not pass for one of the model
        result = Result(name, "zoo failed", f"{type(error).__name__}: {str(error)[:300]}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    sender.send(result.to_dict())
    sender.close()


class _Worker:
    def __init__(self, context: Any, judge: Judge, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.receiver, sender = context.Pipe(duplex=False)
        self.started = time.monotonic()
        self.process: ForkServerProcess = context.Process(
            target=_work, args=(judge, name, limits, sender)
        )
        self.process.start()
        sender.close()

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.started > _CLOCK * self.limits.seconds

    def result(self) -> Result:
        """What it sent, or how it ended without sending anything."""
        try:
            found = Result.from_dict(self.receiver.recv())
        except EOFError:
            self.process.join()
            text = f"its process ended (exit code {self.process.exitcode})"
            found = Result(self.name, "ended", text)
        self.stop()
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.receiver.close()


def run_all(
    judge: Judge,
    names: Sequence[str],
    workers: int,
    time_limit: float | None = None,
    limits: Limits = Limits(),
) -> Iterator[Result]:
    """Results as they come. At the time limit (seconds) what is running is ended and gives none.

    Args:
        judge: a module's function, since processes import it by name.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    deadline = None if time_limit is None else time.monotonic() + time_limit
    waiting, running = list(reversed(names)), list[_Worker]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Worker(context, judge, waiting.pop(), limits))
            connection.wait([worker.receiver for worker in running], timeout=1.0)
            for worker in [*running]:
                if worker.receiver.poll() or worker.overdue:
                    running.remove(worker)
                    if not worker.receiver.poll():
                        worker.process.kill()
                    yield worker.result()
            if deadline is not None and time.monotonic() > deadline:
                return
    finally:
        for worker in running:
            worker.stop()
