"""What is asked of every op of a trace."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutput

from lowmem_patch.tracing.shadow import output_tensors, tensors_in


class Pair(NamedTuple):
    one: Any
    other: Any


def test_tensors_are_found_as_torchs_own_walk_finds_them() -> None:
    a, b, c, d = (torch.ones(n) for n in range(1, 5))
    ordered = collections.OrderedDict(x=a, y=[b, None])
    nested = [a, (b, {"k": [c, 3, "text", torch.float32]}, Pair(d, (a,))), ordered, {4}, b]
    output = CausalLMOutput(loss=a, logits=b, hidden_states=(c, d))
    for value in (a, None, (), nested, output, {"past": output, "more": Pair(1, [d])}):
        expected = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        assert list(map(id, tensors_in(value))) == list(map(id, expected))
    assert len(tensors_in(nested)) == 8


@dataclasses.dataclass
class Returned:
    """What a model of somebody's own may return."""

    loss: Tensor
    hidden: dict[str, tuple[Tensor, None]]


def test_tensors_of_outputs_are_found_in_dataclasses_and_mappings() -> None:
    loss, hidden = torch.zeros(()), torch.ones(2)
    own, librarys = (
        Returned(loss, {"last": (hidden, None)}),
        CausalLMOutput(loss=loss, logits=hidden),
    )
    for output in (own, librarys, {"loss": loss, "more": [hidden]}, (own,)):
        found = output_tensors(output)
        assert [id(tensor) for tensor in found] == [id(loss), id(hidden)]
