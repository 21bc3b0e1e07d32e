"""What torch's compiler cannot trace, whether a model is patched or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import Inputs


def why_unsupported(function: Callable[..., Any], *args: Any) -> str:
    """Why torch.compile cannot trace the function in one graph; nothing if it can."""
    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend="eager")(*args)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def skip_where_torch_breaks_the_graph(unpatched: Any, inputs: Inputs) -> None:
    """Old torch with old transformers cannot trace some models, patched or not."""
    why = why_unsupported(lambda: unpatched(**inputs))
    if why:
        pytest.skip(f"torch itself breaks this graph: {why.splitlines()[0]}")
