"""What planning costs at real sizes: LLaMA-7B on the meta device, in time and memory, and by depth."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_patch import plan_patch

SEVEN_BILLION_LAYERS = 32
SECONDS = 20.0  # of one core; it takes 2
GIB = 2.0


def llama(layers: int) -> Any:
    """LLaMA-7B's widths, which are the config's defaults."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))


def seconds(model: Any) -> float:
    """Processor time of a plan, the better of two: what else the machine does is not counted twice."""
    times = []
    for _ in range(2):
        started = time.process_time()
        plan_patch(model)
        times.append(time.process_time() - started)
    return min(times)


def test_plan_of_llama_7b_takes_seconds_and_little_memory() -> None:
    plan_patch(llama(1))  # what the first plan of a process imports and compiles is not its cost
    model = llama(SEVEN_BILLION_LAYERS)
    unit = 2**10 if sys.platform == "linux" else 1  # macOS counts bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    report = plan_patch(model)
    assert time.process_time() - started < SECONDS
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 2**30
    assert grown < GIB
    assert len(report.sites) == 3 * SEVEN_BILLION_LAYERS + 1
    assert len(report.patched) == len(report.sites)


def test_cost_grows_no_faster_than_depth() -> None:
    plan_patch(llama(1))
    shallow, deep = seconds(llama(8)), seconds(llama(24))
    assert deep < 1.3 * 3 * shallow  # quadratic would be 9 times
