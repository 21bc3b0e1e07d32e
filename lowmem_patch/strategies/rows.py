"""rows: the rows that experts gather of a tensor are gathered again in backward; exact.

The tensor is their input, or the bias of each expert that is added to their last product: a product that is
multiplied with routing weights need not be saved. Nor need a tensor of which `torch.gather` takes numbers.
"""

from __future__ import annotations

from collections import Counter

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.copies import keep_rows
from lowmem_patch.nn.modes import GatherBiases, GatherUnsaved, run_under
from lowmem_patch.strategies.activations import are_weighed, next_to_nothing
from lowmem_patch.strategies.protocol import Change, Facts, Found, forward_obstacle, hook_before
from lowmem_patch.tracing.call_arguments import are_row_numbers, gather_call
from lowmem_patch.tracing.consumers import gathers_for_a_weight
from lowmem_patch.tracing.dataflow import backward, moved_from
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op

_WORTH = 1e-3  # Python looks at each function of the forward


def find(facts: Facts, config: PatchConfig) -> Found:
    """Inputs of which matmuls that train would save more rows than there are, and biases and numbers that are
    gathered."""
    if config.linear_inputs == "keep":
        return Found()
    found: dict[tuple[str, int], None] = {}
    for call in facts.trace.calls:
        gathered: Counter[int] = Counter()
        inputs = {id(tensor): place for place, tensor in enumerate(call.inputs)}
        for op in facts.trace.ops[call.first_op : call.last_op]:
            if op.module == call.name and gathers_for_a_weight(facts.trace, op):
                forms = backward(facts.makers, op.args[0], moved_from)
                place = next((inputs[id(form)] for form in forms if id(form) in inputs), None)
                if place is not None:
                    gathered[place] += op.outputs[0].numel()
        for place, numbers in gathered.items():
            if numbers >= call.inputs[place].numel():
                found[call.name, place] = None
    again = [Change(name, "rows", hook_before, (keep_rows, place)) for name, place in found]
    return (
        Found()
        .take(again, "inputs of which experts gather rows, in backward again")
        .take(_biased(facts), "experts whose last product is not saved, nor its bias")
        .take(_valued(facts), "modules that gather numbers of a tensor, which is not saved")
    )


def _valued(facts: Facts) -> list[Change]:
    """Modules that gather numbers of a tensor that has a gradient, of which torch saves the tensor."""
    gains: Counter[str] = Counter()
    counted = set[int]()
    for op in facts.trace.ops:
        call = gather_call(op.args, op.kwargs) if op.role.has(Role.GATHER) and op.module else None
        if call is None or op.opaque:
            continue
        key = storage_key(call.tensor)
        if key not in counted and facts.is_saved_for(op, call.tensor, alone=True):
            counted.add(key)
            gains[op.module] += facts.storages[key].bytes
    return [
        Change(name, "rows", run_under, (GatherUnsaved,))
        for name, gain in gains.items()
        if not next_to_nothing(facts, gain * facts.alike(name), _WORTH)
        if not forward_obstacle(facts, name, gain)
    ]


def _biased(facts: Facts) -> list[Change]:
    """Modules that add rows of a bias to a product before they multiply it with routing weights."""
    names: dict[str, dict[str, None]] = {}
    for op in facts.trace.ops:
        bias = facts.trace.parameters.get(id(op.args[0])) if op.args else None
        if bias is None or not op.role.has(Role.INDEX) or not are_row_numbers(op.args[1]):
            continue
        site, _, name = bias.rpartition(".")
        if site == op.module and _is_weighed(facts, op) and not forward_obstacle(facts, site):
            names.setdefault(site, {})[name] = None
    return [
        Change(site, "rows", run_under, (GatherBiases, tuple(found)))
        for site, found in names.items()
    ]


def _is_weighed(facts: Facts, gather: Op) -> bool:
    """Whether rows are only added to a product of experts, which is then multiplied with a number for each of
    them that has a gradient."""
    (rows,) = gather.outputs
    readers = facts.trace.consumers.get(id(rows), [])
    if len(readers) != 1 or readers[0].name != "add_" or readers[0].args[1] is not rows:
        return False
    product = readers[0].args[0]
    makers = (op for op in facts.trace.ops if op.outputs and op.outputs[0] is product)
    return any(op.role.has(Role.GROUPED_MATMUL) for op in makers) and are_weighed(facts, product)
