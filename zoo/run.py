"""Judge one architecture by name: what each process of the zoo does."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from zoo.build import Built, CannotBuild, CannotRun, NoModel, build_transformers
from zoo.judge import judge
from zoo.pool import quiet_worker
from zoo.precision import FLOAT32, PRECISIONS, Precision
from zoo.result import Result
from zoo.timm_models import build_timm, reload_timm


def _reload_transformers(model: Any, folder: str) -> Any:
    model.save_pretrained(folder)
    stock = type(model).from_pretrained(folder, dtype=torch.float32)
    for module in stock.modules():
        for key, value in list(vars(module).items()):
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return stock.eval()


def judge_transformers(
    model_type: str, presets: tuple[str, ...] | None = None, precision: Precision = FLOAT32
) -> Result:
    """Build and judge one model type; what cannot be built or run is a result with its reason."""
    return _judged(model_type, build_transformers, _reload_transformers, presets, precision)


def judge_timm(
    variant: str, presets: tuple[str, ...] | None = None, precision: Precision = FLOAT32
) -> Result:
    """As :func:`judge_transformers`, for a variant of timm."""
    result = _judged(variant, build_timm, reload_timm, presets, precision)
    result.name = f"timm/{variant}"
    return result


def _judged(
    name: str, build: Any, reload: Any, presets: tuple[str, ...] | None, precision: Precision
) -> Result:
    started = time.process_time()
    try:
        built: Built = build(name)
        # a checkpoint holds what float32 has been judged by: only `paper` writes other weights
        result = judge(built, reload if precision.tells_all else None, presets, precision)
    except NoModel as error:
        result = Result(name, "no model of its own", str(error))
    except CannotBuild as error:
        result = Result(name, "not built", str(error))
    except CannotRun as error:
        result = Result(name, "not run", str(error))
    result.seconds = round(time.process_time() - started, 1)
    return result


def judge_name(name: str, precision: str = FLOAT32.name) -> Result:
    """For worker processes: ``timm/<variant>`` or a model type; quiet, one thread, offline."""
    judged_in = PRECISIONS[precision]
    os.environ["HF_HUB_OFFLINE"] = "1"
    quiet_worker()
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in convolutions too
    if name.startswith("timm/"):
        return judge_timm(name.removeprefix("timm/"), precision=judged_in)
    return judge_transformers(name, precision=judged_in)
