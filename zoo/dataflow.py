"""Which norms of a model are read by Linears: the denominator of the zoo's shares."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

from lowmem_patch import PatchReport
from lowmem_patch.constants import ACTIVATION_KINDS
from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.consumers import find_consumers
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow, make_shadow
from lowmem_patch.tracing.trace import trace_forward

NORM_KINDS = ("layer_norm", "rms_norm")


@dataclasses.dataclass
class Dataflow:
    """Norms by what reads them, and whether the model holds anything that could be patched."""

    linear_norms: tuple[str, ...]  # read by Linears alone
    in_front: tuple[str, ...]  # read by at least one Linear
    eligible: bool


def read_dataflow(model: Any, inputs: ExampleInputs, report: PatchReport) -> Dataflow:
    """Trace the unpatched model and look at every norm-like site of the report."""
    try:
        shadow = make_shadow(model, inputs)
        trace = trace_forward(shadow)
    except TraceError:
        shadow = Shadow(copy.deepcopy(model), inputs, None)
        trace = trace_forward(shadow)
    linear_norms, in_front, eligible = [], [], False
    modules = dict(model.named_modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for site in report.sites:
            if site.kind in ACTIVATION_KINDS:
                eligible = True
                continue
            module = modules.get(site.name)
            if module is None:  # a function that a forward calls
                continue
            if site.kind not in NORM_KINDS and "norm" not in type(module).__name__.lower():
                continue
            outputs = [t for call in trace.calls if call.name == site.name for t in call.outputs]
            uses = {consumer.use for consumer in find_consumers(trace, outputs)}
            if uses == {"linear"}:
                linear_norms.append(site.name)
            if "linear" in uses:
                in_front.append(site.name)
                eligible = eligible or site.kind in NORM_KINDS
    return Dataflow(tuple(linear_norms), tuple(in_front), eligible)
