"""Judge one architecture by name, with a time limit: what each worker of the zoo does."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from zoo.build import Built, CannotBuild, CannotRun, build_transformers
from zoo.judge import PRESETS, judge
from zoo.result import Result
from zoo.timm_models import build_timm, reload_timm

__all__ = ["judge_name", "judge_timm", "judge_transformers"]

SECONDS = 90  # of one core
MEMORY = 9 * 2**30  # bytes of addresses, of which a worker needs half


class TooSlow(BaseException):
    """Not an Exception: nothing on the way may take it for a refusal."""


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"takes longer than {seconds} s of one core")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _reload_transformers(model: Any, folder: str) -> Any:
    model.save_pretrained(folder)
    stock = type(model).from_pretrained(folder, dtype=torch.float32)
    for module in stock.modules():
        for key, value in list(vars(module).items()):
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return stock.eval()


def judge_transformers(model_type: str, presets: tuple[str, ...] = PRESETS) -> Result:
    """Build and judge one model type; what cannot be built or run is a result with its reason."""
    return _judged(model_type, build_transformers, _reload_transformers, presets)


def judge_timm(variant: str, presets: tuple[str, ...] = PRESETS) -> Result:
    """As :func:`judge_transformers`, for a variant of timm."""
    result = _judged(variant, build_timm, reload_timm, presets)
    result.name = f"timm/{variant}"
    return result


def _judged(name: str, build: Any, reload: Any, presets: tuple[str, ...]) -> Result:
    started = time.process_time()
    try:
        with _limit(SECONDS):
            built: Built = build(name)
            result = judge(built, reload, presets)
    except CannotBuild as error:
        result = Result(name, "not built", str(error))
    except CannotRun as error:
        result = Result(name, "not run", str(error))
    except TooSlow as error:
        result = Result(name, "slow", str(error))
    result.seconds = round(time.process_time() - started, 1)
    return result


def judge_name(name: str) -> Result:
    """For worker processes: ``timm/<variant>`` or a model type; quiet, one thread, offline."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import transformers

    gc.collect()  # the last model: its modules and hooks refer to each other
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    if name.startswith("timm/"):
        return judge_timm(name.removeprefix("timm/"))
    return judge_transformers(name)
