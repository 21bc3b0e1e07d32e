"""The backward of a large Linear behind an activation, which is computed some columns at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_patch.functional import products_backward
from lowmem_patch.functional.products_backward import linear_backward
from tests.ops.conftest import INTERPRETED, Backend
from tests.support.live import LiveBytes

COLUMNS, OUT, RANK = 640, 8, 8
ALL = (True,) * 5


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts: of 256, 256 and 128 columns."""
    monkeypatch.setattr(products_backward, "_PART_BYTES", 1)
    monkeypatch.setattr(products_backward, "_MOST_PARTS", 3)


class Case:
    """A gated Linear's backward, in ``dtype`` and in float64."""

    def __init__(self, dtype: torch.dtype, device: str, gated: bool, packed: bool) -> None:
        torch.manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape).to(device, dtype)

        gate, up = numbers(2, 3, 2 * COLUMNS).chunk(2, -1)
        if not packed:
            gate, up = gate.clone(), up.clone()
        self.sources = (gate, up if gated else None)
        self.dy, self.weight = numbers(2, 3, OUT), numbers(OUT, COLUMNS)
        self.low = (numbers(RANK, COLUMNS), numbers(OUT, RANK), numbers(6, RANK))

    def run(self, implementation: str, needs: Any, *, wide: bool = False) -> list[Tensor]:
        def given(tensor: Tensor | None) -> Tensor | None:
            return tensor.double() if wide and tensor is not None else tensor

        tensors: Any = map(given, (self.dy, *self.sources, self.weight, *self.low))
        rest: Any = (0.5, "silu", needs, implementation)
        found = linear_backward(*tensors, *rest)
        first = products_backward._column_parts(self.dy.new_empty(6, 1), COLUMNS)[0]
        assert found[-1].numel() == 6 * (COLUMNS if first is None else first.stop)
        return found[:-1]  # the last is what is needed meanwhile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("gated", "packed"), [(True, True), (True, False), (False, True)])
def test_parts_are_as_near_to_float64_as_the_whole(
    backend: Backend,
    dtype: torch.dtype,
    gated: bool,
    packed: bool,
    request: pytest.FixtureRequest,
) -> None:
    case = Case(dtype, backend.device, gated, packed)
    whole = case.run(backend.implementation, ALL)
    request.getfixturevalue("in_parts")
    wanted = case.run("reference", ALL, wide=True)
    parts = case.run(backend.implementation, ALL)
    assert len(parts) == len(whole) == len(wanted)
    for part, one, true in zip(parts, whole, wanted, strict=True):
        assert part.shape == one.shape and part.dtype == one.dtype
        own = float((one.double() - true).abs().max())
        error = float((part.double() - true).abs().max())
        # a product of other columns may be summed in another order
        assert error <= own + 4 * torch.finfo(dtype).eps * float(true.abs().max())


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_gradients_that_nobody_needs_change_no_other(
    needs: tuple[bool, ...], backend: Backend
) -> None:
    """Of weight, lora_A and lora_B, beside those of the sources."""
    for_weight, for_A, for_B = needs
    case = Case(torch.float32, backend.device, True, True)
    asked = (True, for_weight, False, for_A, for_B)
    every = case.run(backend.implementation, (True, True, False, True, True))
    wanted = [*every[:2], *(g for g, need in zip(every[2:], needs, strict=True) if need)]
    found = case.run(backend.implementation, asked)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="of eager torch")
def test_who_counts_bytes_sees_a_part_of_the_gradient_of_the_value(
    request: pytest.FixtureRequest,
) -> None:
    def peak() -> int:
        gate, up = (torch.empty(6, COLUMNS) for _ in range(2))
        tensors = torch.empty(6, OUT), gate, up, torch.empty(OUT, COLUMNS), None, None, None
        with LiveBytes() as live:
            found = products_backward.linear_backward_op(
                *tensors, 1.0, "silu", [True, False, False, False, False], "reference"
            )
            assert len(found) == 3
            return int(live.peak)

    gradient = 6 * COLUMNS * 4
    with FakeTensorMode():
        assert peak() == 3 * gradient
        request.getfixturevalue("in_parts")
        assert peak() == 2 * gradient + 6 * 256 * 4


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_fakes_have_the_shapes_of_parts(gated: bool, backend: Backend) -> None:
    case = Case(torch.float32, backend.device, gated, False)
    given: Any = (case.dy, *case.sources, case.weight, *case.low, 0.5, "silu", ALL)
    real = linear_backward(*given, backend.implementation)
    fake = products_backward._backward_fake(*given, backend.implementation)
    assert [t.shape for t in fake] == [t.shape for t in real]


def test_small_values_and_odd_widths_are_one_part() -> None:
    def rows(number: int) -> Tensor:
        return torch.empty(number, 1, dtype=torch.bfloat16, device="meta")

    quarters = [slice(start, start + 3584) for start in range(0, 14336, 3584)]
    assert products_backward._column_parts(rows(1 << 15), 14336) == quarters
    halves = [slice(0, 7168), slice(7168, 14336)]
    assert products_backward._column_parts(rows(8192), 14336) == halves
    assert products_backward._column_parts(rows(8192), 4864) == [None]
    assert products_backward._column_parts(rows(1 << 16), 4304) == [None]  # no multiple of 128
