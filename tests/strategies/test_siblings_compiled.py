"""LoRA layers that read one tensor, in models that torch.compile compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.strategies.test_siblings import Change, adapted, data, layers, other_x, patched


def break_graph(_: Any, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


@pytest.fixture
def compiled() -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def joint_ops(compiled: CompileCounterWithBackend) -> int:
    targets = (str(node.target) for graph in compiled.graphs for node in graph.graph.nodes)
    return sum(target.startswith("lowmem_patch.sibling_linears") for target in targets)


def test_compiled_they_are_one_operator(compiled: CompileCounterWithBackend) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    given = [data().requires_grad_() for _ in range(2)]
    run = torch.compile(model, backend=compiled, fullgraph=True)
    for _ in range(2):
        for one, call, x in ((model, run, given[0]), (twin, twin, given[1])):
            one.zero_grad()
            x.grad = None
            call(x).square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad)
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    assert joint_ops(compiled) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler itself
@pytest.mark.parametrize("change", [break_graph, other_x])
def test_compiled_with_something_between(
    change: Change, compiled: CompileCounterWithBackend
) -> None:
    """The graph breaks behind q, or k and v read another tensor."""
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    for one in (model, twin):
        layers(one).between = change
    run = torch.compile(model, backend=compiled)
    for _ in range(2):
        torch.testing.assert_close(run(data()), twin(data()))
