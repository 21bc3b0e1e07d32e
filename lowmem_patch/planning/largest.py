"""The largest batch or length whose training step fits a budget, where blocks may run again.

With all blocks at the level that holds least, few blocks tell what a size takes. Lines through such sizes
give the largest one. It is planned, and its least budget corrects it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import TraceError
from lowmem_patch.memory import Training, largest_that_fits
from lowmem_patch.nn.host_memory import buffer_bytes
from lowmem_patch.planning.budget import Budget
from lowmem_patch.planning.choices import input_sizes
from lowmem_patch.planning.fit import Fitting
from lowmem_patch.planning.fit_model import fitting_of
from lowmem_patch.planning.planner import plan_model
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import fake_inputs

CLOSE = 0.01  # of the size: a larger one that is no further away is not looked for


def largest_fit(
    model: nn.Module,
    config: PatchConfig,
    make_inputs: Callable[[int], ExampleInputs],
    budget: Budget,
    training: Training,
    *,
    start: int,
    bound: int,
    host: int,
) -> int:
    """The largest size that a budget holds, up to 1 %; 0 where it does not hold the size 1.

    Args:
        model: unpatched, also on the meta device.
        make_inputs: makes inputs of a size, which is a batch or a length.
        training: its optimizer, accumulation and GPUs.
        start: the size from which others are told.
        bound: no larger size is looked for.
        host: bytes of host memory that may hold what blocks offload.

    Raises:
        BudgetError: nothing trains, or the model cannot run on fake tensors.
        TraceError: the model cannot run with inputs of some size.
    """

    @functools.cache
    def fitting(size: int) -> Fitting:
        planned = plan_model(model, config, make_inputs(size))
        return fitting_of(model, planned, budget.asked, training, host=host, timed=False)

    total = _totals(fitting(start), budget, make_inputs, start)
    guess = largest_that_fits(total, budget.bytes, bound)
    fits, exceeds = 0, bound + 1
    while guess - fits > CLOSE * fits:
        one = fitting(guess)
        left = budget.bytes - one.total(one.least[1], budget)
        fits, exceeds = (guess, exceeds) if left >= 0 else (fits, guess)
        half = (guess + 1) // 2
        rise = max(1, (total(guess) - total(half)) // max(1, guess - half))
        step = left // rise if left >= 0 else min(left // rise, -int(CLOSE * guess / 2) - 1)
        guess = min(max(guess + step, fits or 1), exceeds - 1)
    return fits


def _totals(
    fitting: Fitting, budget: Budget, make_inputs: Callable[[int], ExampleInputs], start: int
) -> Callable[[int], int]:
    """What a step of a size takes with all blocks at the level that holds least: the inputs of blocks that
    host memory has no room for are held as well."""
    level = "host" if fitting.host and fitting.free else "checkpointed"
    sizes, mode = input_sizes(fitting.patched), fitting.shadow.mode
    assert mode is not None  # or it would not have steps

    def held(size: int) -> int:
        room, more = fitting.host, 0
        for one in sizes if level == "host" else ():
            wanted = one * size // start
            room -= buffer_bytes(wanted)
            more += wanted if room < 0 else 0
        return more

    @functools.cache
    def total(size: int) -> int:
        try:
            inputs = fake_inputs(make_inputs(size), mode, torch.device("cpu"))
            step = fitting.profile(level, inputs=inputs)
        except TraceError:
            if size >= start:
                raise
            return 0  # a few models take no such small inputs
        return fitting.total(step, budget) + held(size)

    return total
