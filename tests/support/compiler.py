"""What torch's compiler cannot trace, whether a model is patched or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

from tests.support.models import Inputs


class Graphs:
    """A backend that runs what it is given, and looks at the tensors of forward and backward.

    ``options``: of torch's aot_autograd, as the partition that says what is saved.
    """

    def __init__(self, **options: Any) -> None:
        torch._dynamo.reset()
        self.made: list[torch.fx.GraphModule] = []
        run: Any = aot_autograd(fw_compiler=self._note, bw_compiler=self._note, **options)
        self.backend = run

    def _note(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.made.append(graph)
        return make_boxed_func(graph)

    def largest(self) -> int:
        """Numbers of the largest floating tensor with a memory of its own that the graphs make."""
        found = [0]
        for graph in self.made:
            for node in graph.graph.nodes:
                made = node.meta.get("val") if node.op == "call_function" else None
                for tensor in tree_leaves(made):
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                        found.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return max(found)


def why_unsupported(function: Callable[..., Any], *args: Any) -> str:
    """Why torch.compile cannot trace the function in one graph; nothing if it can."""
    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend="eager")(*args)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


@contextlib.contextmanager
def skipped_where_torch_breaks_the_graph(unpatched: Any, inputs: Inputs) -> Iterator[None]:
    """Old torch with old transformers cannot trace some models, patched or not: asked if a graph breaks."""
    try:
        yield
    except torch._dynamo.exc.Unsupported:
        why = why_unsupported(lambda: unpatched(**inputs))
        if not why:
            raise
        pytest.skip(f"torch itself breaks this graph: {why.splitlines()[0]}")
