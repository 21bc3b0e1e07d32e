"""The variants of a curve of memory against time."""

from __future__ import annotations

from typing import Any

from lowmem_patch.api import plan_patch
from lowmem_patch.bench.variants import Variant, find_variant
from lowmem_patch.errors import BudgetError
from lowmem_patch.planning.fit_report import size_text
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import tensors_in

# of the memory between the least budget and what a patched step takes
_SHARES = (0.7, 0.4, 0.2, 0.1, 0.02)
_EVERY = (4, 2, 1)


def curve_variants(model: Any, inputs: ExampleInputs) -> dict[str, Variant]:
    """The preset ``auto`` at several budgets, with checkpointing of every k-th block, and what is common
    today: the unpatched model, Liger's, and both with checkpointing.

    Args:
        model: unpatched, as it will train. All of it is moved to where the inputs are: its adapters may have
            been made elsewhere.
        inputs: of a step.

    Raises:
        TraceError: the model cannot be planned on the inputs.
    """
    model.to(tensors_in((inputs.args, inputs.kwargs))[0].device)
    sizes = [size_text(size).replace(" ", "") for size in _budgets(model, inputs)]
    names = ["auto", *(f"fit={size}" for size in sizes)]
    names += [f"auto+every={count}" for count in _EVERY]
    for peer in ("unpatched", "liger"):
        names += [peer, *(f"{peer}+every={count}" for count in _EVERY)]
    return {name: find_variant(name) for name in names}


def _budgets(model: Any, inputs: ExampleInputs) -> list[int]:
    """Bytes of several budgets, the largest first."""
    most = plan_patch(model, "auto", example_inputs=inputs, fit="1024TiB").fit
    assert most is not None
    try:
        plan_patch(model, "auto", example_inputs=inputs, fit=most.parameters)
    except BudgetError as error:
        least = error.least or most.parameters
        return [least + int(share * (most.predicted - least)) for share in _SHARES]
    return []
