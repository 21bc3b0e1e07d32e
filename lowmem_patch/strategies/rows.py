"""rows: the rows that experts gather of a tensor are gathered again in backward; exact."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.copies import keep_rows
from lowmem_patch.nn.own import Own
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target
from lowmem_patch.tracing.consumers import gathers_for_a_weight
from lowmem_patch.tracing.dataflow import backward, first_input, makers
from lowmem_patch.tracing.row_moves import moves_rows
from lowmem_patch.tracing.trace import Op


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


def find(facts: Facts, config: PatchConfig) -> Found:
    """Inputs of which matmuls that train would save more rows than there are."""
    if config.linear_inputs == "keep":
        return Found()
    made_by = makers(facts.trace)
    patches: dict[GatheredInput, None] = {}
    for call in facts.trace.calls:
        gathered: Counter[int] = Counter()
        inputs = {id(tensor): place for place, tensor in enumerate(call.inputs)}
        for op in facts.trace.ops[call.first_op : call.last_op]:
            if op.module == call.name and gathers_for_a_weight(facts.trace, op):
                forms = backward(made_by, op.args[0], _moved_from)
                place = next((inputs[id(form)] for form in forms if id(form) in inputs), None)
                if place is not None:
                    gathered[place] += op.outputs[0].numel()
        for place, numbers in gathered.items():
            if numbers >= call.inputs[place].numel():
                patches[GatheredInput(call.name, place)] = None
    notes = [f"inputs of which experts gather rows, in backward again: {len(patches)}"]
    return Found(list(patches), notes=notes if patches else [])


def _moved_from(op: Op, tensor: Tensor) -> Tensor | None:
    """What a view or another order of its rows was made of."""
    source = first_input(op)
    if source is None or op.writes or len(op.outputs) != 1:
        return None
    return source if moves_rows(op.func, op.args, op.kwargs, source, tensor) else None
