"""What planning costs at real sizes: LLaMA-7B on the meta device, in time and memory, and by depth."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_patch import plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError
from lowmem_patch.memory import Training, make_plans, predict_memory, steps
from lowmem_patch.planning import suggestions
from lowmem_patch.planning.budget import make_budget
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support.stacks import rows, stack
from tests.support.step import warned

SEVEN_BILLION_LAYERS = 32
SECONDS = 20.0  # of one core; it takes 2
GIB = 2.0
OPS = 20_000


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


@pytest.mark.slow
def test_cost_grows_no_faster_than_depth() -> None:
    plan_patch(llama(1))
    shallow, deep = seconds(llama(8)), seconds(llama(24))
    assert deep < 1.3 * 3 * shallow  # quadratic would be 9 times


@pytest.mark.slow
def test_what_fits_takes_few_steps_and_few_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `inspect --memory` runs, by what costs time in it: ops on fake tensors."""
    ops: list[str] = []
    ran: list[str] = []
    dispatch, run_levels = FakeTensorMode.dispatch, steps.run_levels

    def dispatched(self: Any, func: Any, *rest: Any, **more: Any) -> Any:
        ops.append(str(func))
        return dispatch(self, func, *rest, **more)

    def noted(*given: Any, **more: Any) -> Any:
        ran.append("step")
        return run_levels(*given, **more)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatched)
    monkeypatch.setattr(steps, "run_levels", noted)
    model, config = llama(SEVEN_BILLION_LAYERS), load_config("auto")

    def make(rows: int, length: int | None) -> ExampleInputs:
        tokens = torch.empty(rows, length or 64, dtype=torch.long, device="meta")
        return ExampleInputs((), {"input_ids": tokens})

    plans = make_plans(model, config, make(2, 64))
    predict_memory(
        model, config, make, batch_size=2, length=64, limit=2**34, solve="batch", plans=plans
    )
    found = suggestions.find_suggestions(
        model, config, make(2, 64), Training(), make_budget("16GiB", model)
    )
    # smaller length and batch; before and after the patch, this size and a batch of 1
    assert (
        len(ran) == len([suggestion for suggestion in found if not suggestion.on_top]) + 2 + 2 * 2
    )
    assert ops.count("prim.device.default") < 0.02 * len(ops)
    assert len(ops) < OPS


def test_a_budget_runs_no_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step at one level for all blocks is needed for the sums, and again in the search for the least."""
    ran: list[str] = []
    run_levels = steps.run_levels

    def noted(shadow: Any, blocks: Any, levels: Any, *, inputs: Any, **how: Any) -> Any:
        if inputs is None:
            ran.append(str((sorted(levels.items()), how)))
        return run_levels(shadow, blocks, levels, inputs=inputs, **how)

    monkeypatch.setattr(steps, "run_levels", noted)
    with warned(), pytest.raises(BudgetError):
        plan_patch(stack(), "exact", example_inputs=rows(), fit="1KiB")
    assert ran and sorted(set(ran)) == sorted(ran)
