"""Grouped products of fake tensors have the shapes, strides and dtypes of the real ones; what fails on data
fails there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import plan_patch
from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.fake_mode import make_fake_mode
from lowmem_patch.tracing.inputs import as_example_inputs

ROWS, WIDTH, OUTPUTS, GROUPS = 16, 24, 8, 3
# factors, and whether they come with the end of each group
FACTORS = {
    "rows by group": ((ROWS, WIDTH), (GROUPS, WIDTH, OUTPUTS), True),
    "sums by group": ((WIDTH, ROWS), (ROWS, OUTPUTS), True),
    "columns by group": ((GROUPS, OUTPUTS, WIDTH), (WIDTH, ROWS), True),
    "batched": ((GROUPS, ROWS, WIDTH), (GROUPS, WIDTH, OUTPUTS), False),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factors", FACTORS.values(), ids=list(FACTORS))
def test_a_product_has_the_real_shape(factors: Any, dtype: torch.dtype) -> None:
    a_shape, b_shape, grouped = factors
    a, b = torch.randn(a_shape, dtype=dtype), torch.randn(b_shape, dtype=dtype)
    ends = torch.tensor([4, 8, 16], dtype=torch.int32) if grouped else None
    real = F.grouped_mm(a, b, offs=ends)
    mode = make_fake_mode()
    fakes = [None if t is None else mode.from_tensor(t) for t in (a, b, ends)]
    with mode:
        fake = F.grouped_mm(fakes[0], fakes[1], offs=fakes[2])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_its_gradients_have_the_real_shapes(dtype: torch.dtype) -> None:
    mode = make_fake_mode()
    a = mode.from_tensor(torch.zeros(ROWS, WIDTH, dtype=dtype)).requires_grad_()
    b = mode.from_tensor(torch.zeros(GROUPS, WIDTH, OUTPUTS, dtype=dtype)).requires_grad_()
    with mode:
        y: Tensor = F.grouped_mm(a, b, offs=torch.zeros(GROUPS, dtype=torch.int32))
        torch.autograd.backward(y.sum())
    assert a.grad is not None and b.grad is not None
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
    assert a.grad.dtype == b.grad.dtype == dtype


def test_factors_of_two_dtypes_stay_an_error() -> None:
    mode = make_fake_mode()
    a, b = torch.zeros(ROWS, WIDTH), torch.zeros(GROUPS, WIDTH, OUTPUTS).half()
    with mode, pytest.raises(RuntimeError, match="same dtype"):
        F.grouped_mm(
            mode.from_tensor(a), mode.from_tensor(b), offs=mode.from_tensor(torch.zeros(3).int())
        )


def test_tokens_that_are_no_integers_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with pytest.raises(TraceError, match=r"Embedding in 0: RuntimeError: Expected tensor.*indices"):
        plan_patch(model, example_inputs=(torch.ones(2, 3),))
    with pytest.raises(TraceError, match=r"an embedding is indexed by integers.*float32"):
        plan_patch(model.to("meta"), example_inputs=(torch.ones(2, 3),))


def test_rows_of_numbers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    with pytest.raises(
        TraceError, match=r"example_inputs\['input'\] is a list of lists of numbers"
    ):
        plan_patch(model, example_inputs={"input": [[1, 2], [3, 4]]})


def test_lists_beside_tensors_are_the_models_own() -> None:
    given = as_example_inputs({"pixels": torch.ones(1, 3), "sizes": [[4, 4]]})
    assert given.kwargs["sizes"] == [[4, 4]]
