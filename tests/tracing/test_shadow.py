"""What is asked of every op of a trace."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutput

from lowmem_patch.tracing.shadow import finite_parts, named_tensors, output_tensors, tensors_in


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


def test_places_of_outputs_are_named() -> None:
    output = (Returned(torch.zeros(()), {"last": (torch.ones(2), None)}), [torch.ones(1)])
    names = [name for name, _ in named_tensors(output)]
    assert names == ["output 0.loss", "output 0.hidden.last.0", "output 1.0"]
    assert [name for name, _ in named_tensors(torch.ones(1))] == ["output"]


def test_infinities_are_compared_and_then_left_out() -> None:
    inf = float("inf")
    masked, other = torch.tensor([1.0, -inf, 3.0]), torch.tensor([2.0, -inf, 3.0])
    one, two = finite_parts(masked, other) or ()
    assert one.tolist() == [1.0, 0.0, 3.0] and two.tolist() == [2.0, 0.0, 3.0]
    for wrong in ([1.0, inf, 3.0], [1.0, 2.0, 3.0], [-inf, -inf, 3.0]):
        assert finite_parts(masked, torch.tensor(wrong)) is None
