"""In which dtypes a model's matmuls run, seen below autograd and custom ops: by torch's profiler."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import torch

from lowmem_patch.tracing.inputs import ExampleInputs
from zoo.build import tensors_of
from zoo.precision import Precision
from zoo.steps import autocast, buffers_stay

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # each profile would be announced on standard error
# aten's matmuls, and the place of the first of their two factors.
_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_CONVOLUTION = "aten::_convolution"
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)


def products(model: Any, inputs: ExampleInputs, precision: Precision) -> Counter[str]:
    """Multiplications of matmuls, attention and convolutions by dtype, of a forward in training mode."""
    model.train()
    torch.manual_seed(3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        buffers_stay(model),
        torch.profiler.profile(
            activities=activities, record_shapes=True, acc_events=True
        ) as profile,
        autocast(precision),
    ):
        tensors_of(model(*inputs.args, **inputs.kwargs))  # reads logits that are computed when read
    model.eval()
    counts: Counter[str] = Counter()
    for event in _innermost(profile.profiler.kineto_results.events()):
        place = _FACTORS.get(event.name(), 0)
        dtype = event.dtypes()[place].removeprefix("c10::")
        counts[dtype] += _multiplications(event.name(), event.shapes()[place:])
    return counts


def _innermost(events: list[Any]) -> list[Any]:
    """The products among the events; one around another is a cast's, or takes a group apart."""
    found = [event for event in events if event.name() in (*_FACTORS, _CONVOLUTION, *_ATTENTION)]
    found.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
    ends = [event.start_ns() + event.duration_ns() for event in found]
    starts = [*(event.start_ns() for event in found), math.inf][1:]
    return [event for event, end, behind in zip(found, ends, starts, strict=True) if behind >= end]


def _multiplications(name: str, shapes: list[list[int]]) -> int:
    """Of one op, by the shapes of its factors."""
    if name in _FACTORS:
        return math.prod(shapes[0]) * shapes[1][-1]
    if name == _CONVOLUTION:
        return math.prod(shapes[0]) * math.prod(
            shapes[1]
        )  # but for strides: to compare, not to know
    query, key, value = shapes[:3]
    return math.prod(query[:-1]) * key[-2] * (key[-1] + value[-1])
