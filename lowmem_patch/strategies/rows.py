"""rows: the rows that experts gather of a tensor are gathered again in backward; exact.

The tensor is their input, or the bias of each expert that is added to their last product: a product that is
multiplied with routing weights need not be saved. Nor need a tensor of which `torch.gather` takes numbers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.copies import keep_rows
from lowmem_patch.nn.modes import GatherBiases, GatherUnsaved, run_under
from lowmem_patch.nn.own import Own
from lowmem_patch.strategies.activations import next_to_nothing
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target, forward_obstacle
from lowmem_patch.tracing.call_arguments import are_row_numbers, gather_call
from lowmem_patch.tracing.consumers import gathers_for_a_weight
from lowmem_patch.tracing.dataflow import backward, makers, moved_from
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op, Trace

_WORTH = 1e-3  # Python looks at each function of the forward


@dataclasses.dataclass(frozen=True)
class GatheredInput(Patch):
    """A module whose matmuls save its input and the numbers of the rows, and not the rows.

    Attributes:
        place: of the input among the tensors that the module is called with.
    """

    strategy = "rows"

    place: int

    def apply(self, target: Target) -> None:
        module = target.model.get_submodule(self.site)
        module.register_forward_pre_hook(Own(keep_rows, self.place), with_kwargs=True)


@dataclasses.dataclass(frozen=True)
class GatheredBias(Patch):
    """A module that adds rows of a bias to its last product.

    Attributes:
        names: of the biases, among the module's parameters.
    """

    strategy = "rows"

    names: tuple[str, ...]

    def apply(self, target: Target) -> None:
        run_under(target.model.get_submodule(self.site), GatherBiases, self.names)


class GatheredValues(Patch):
    """A module that gathers numbers of tensors which nobody else saves."""

    strategy = "rows"

    def apply(self, target: Target) -> None:
        run_under(target.model.get_submodule(self.site), GatherUnsaved)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Inputs of which matmuls that train would save more rows than there are, and biases and numbers that are
    gathered."""
    if config.linear_inputs == "keep":
        return Found()
    made_by = makers(facts.trace)
    patches: dict[GatheredInput, None] = {}
    for call in facts.trace.calls:
        gathered: Counter[int] = Counter()
        inputs = {id(tensor): place for place, tensor in enumerate(call.inputs)}
        for op in facts.trace.ops[call.first_op : call.last_op]:
            if op.module == call.name and gathers_for_a_weight(facts.trace, op):
                forms = backward(made_by, op.args[0], moved_from)
                place = next((inputs[id(form)] for form in forms if id(form) in inputs), None)
                if place is not None:
                    gathered[place] += op.outputs[0].numel()
        for place, numbers in gathered.items():
            if numbers >= call.inputs[place].numel():
                patches[GatheredInput(call.name, place)] = None
    biased = _biased(facts)
    notes = []
    if patches:
        notes.append(f"inputs of which experts gather rows, in backward again: {len(patches)}")
    if biased:
        notes.append(f"experts whose last product is not saved, nor its bias: {len(biased)}")
    values = _valued(facts)
    if values:
        notes.append(f"modules that gather numbers of a tensor, which is not saved: {len(values)}")
    return Found([*patches, *biased, *values], notes=notes)


def _valued(facts: Facts) -> list[GatheredValues]:
    """Modules that gather numbers of a tensor that has a gradient, of which torch saves the tensor."""
    gains: Counter[str] = Counter()
    sizes = {storage.key: storage.bytes for storage in facts.trace.saved.storages}
    for op in facts.trace.ops:
        call = gather_call(op.args, op.kwargs) if op.role.has(Role.GATHER) and op.module else None
        if call is None or op.opaque:
            continue
        key = storage_key(call.tensor)
        savers = {(one.module, one.function) for one in facts.savers.get(key, ())}
        if savers == {(op.module, op.name)}:
            gains[op.module] += sizes.pop(key, 0)
    return [
        GatheredValues(name)
        for name, gain in gains.items()
        if not next_to_nothing(facts, gain * facts.alike(name), _WORTH)
        if not forward_obstacle(facts, name, gain)
    ]


def _biased(facts: Facts) -> list[GatheredBias]:
    """Modules that add rows of a bias to a product before they multiply it with routing weights."""
    names: dict[str, dict[str, None]] = {}
    for op in facts.trace.ops:
        bias = facts.trace.parameters.get(id(op.args[0])) if op.args else None
        if bias is None or not op.role.has(Role.INDEX) or not are_row_numbers(op.args[1]):
            continue
        site, _, name = bias.rpartition(".")
        if site == op.module and _is_weighed(facts.trace, op) and not forward_obstacle(facts, site):
            names.setdefault(site, {})[name] = None
    return [GatheredBias(site, tuple(found)) for site, found in names.items()]


def _is_weighed(trace: Trace, gather: Op) -> bool:
    """Whether rows are only added to a product of experts, which is then multiplied with a number for each of
    them that has a gradient."""
    (rows,) = gather.outputs
    readers = trace.consumers.get(id(rows), [])
    if len(readers) != 1 or readers[0].name != "add_" or readers[0].args[1] is not rows:
        return False
    product = readers[0].args[0]
    makers = [op for op in trace.ops if op.outputs and op.outputs[0] is product]
    if not any(op.role.has(Role.GROUPED_MATMUL) for op in makers):
        return False
    return any(
        op.role.has(Role.PRODUCT) and any(_weighs(other, product) for other in op.args)
        for op in trace.consumers.get(id(product), [])
    )


def _weighs(factors: Any, product: Tensor) -> bool:
    alike = isinstance(factors, Tensor) and factors.shape == (*product.shape[:-1], 1)
    return alike and bool(factors.requires_grad)
