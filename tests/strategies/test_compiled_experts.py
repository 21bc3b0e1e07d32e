"""Experts in a compiled graph: rows are gathered again in backward, as in eager code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_patch import patch_model
from lowmem_patch.tracing.saved_bytes import storage_key
from tests.strategies.test_experts import ROWS, WIDTH, experts, tokens
from tests.support.judge import assert_accurate
from tests.support.step import FP32, step, truth_of
from tests.support.versions import before

pytestmark = [
    pytest.mark.skipif(before("transformers", "5.18"), reason="it writes into the rows"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # torch's compiler, of a function of autograd
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def tensors_of_rows(model: Any) -> int:
    """How many tensors of a row for each token and expert a forward saves."""
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**tokens())
    keys = {storage_key(tensor) for tensor in found if tensor.shape == (ROWS, WIDTH)}
    return len(keys)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_a_compiled_model_gathers_rows_again(name: str) -> None:
    model = experts(name)
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=tokens())
    torch.compiler.reset()
    # decomposed and cut as for inductor, but run eagerly
    ours, theirs = (
        torch.compile(one, backend="aot_eager_decomp_partition") for one in (model, stock)
    )
    own, found = step(theirs, tokens()), step(ours, tokens())
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = "eager"
    assert_accurate(found, own, truth_of(exact, tokens()), FP32)
    # the product that is multiplied with routing weights is left
    assert (tensors_of_rows(theirs), tensors_of_rows(ours)) == (2, 1)
