"""sibling_linears: Linears with adapters that read one tensor, as one op."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import AdaptedLinear, LowRank, recast_linear, sibling_linears
from lowmem_patch.functional._implementation import module
from tests.ops.conftest import Backend
from tests.support.judge import assert_close, assert_within_budget
from tests.support.saved import saved_storages

FEATURES = 24
SIZES = ((16, 4), (10, 8), (12, 3))  # outputs and rank of each: q, k and v of different sizes
SCALES = (0.7, 2.0, 1.0)


def make_linears(
    device: str, dtype: torch.dtype, adapter_dtype: torch.dtype, *, trained: bool = False
) -> list[AdaptedLinear]:
    """The second has no bias."""
    found = []
    for place, ((outputs, rank), scale) in enumerate(zip(SIZES, SCALES, strict=True)):
        weight, bias = torch.randn(outputs, FEATURES), torch.randn(outputs)
        lora_A, lora_B = torch.randn(rank, FEATURES), torch.randn(outputs, rank)
        low = LowRank(
            *(t.to(device, adapter_dtype).requires_grad_() for t in (lora_A, lora_B)), scale
        )
        weight, bias = (t.to(device, dtype).requires_grad_(trained) for t in (weight, bias))
        found.append(AdaptedLinear(weight, None if place == 1 else bias, low))
    return found


def trained_of(x: Tensor, linears: Sequence[AdaptedLinear]) -> list[Tensor]:
    given = [x, *(t for one in linears for t in (one.weight, one.bias, *one.adapter[:2]))]
    return [t for t in given if t is not None and t.requires_grad]


def one_by_one(x: Tensor, linears: Sequence[AdaptedLinear]) -> list[Tensor]:
    return [
        F.linear(x, weight, bias) + F.linear(F.linear(x, lora_A), lora_B) * scale
        for weight, bias, (lora_A, lora_B, scale) in linears
    ]


def in_float64(x: Tensor, linears: Sequence[AdaptedLinear]) -> tuple[Tensor, list[AdaptedLinear]]:
    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.detach().double().requires_grad_(t.requires_grad)

    twins = [
        AdaptedLinear(wide(w), wide(b), LowRank(wide(A), wide(B), scale))  # type: ignore[arg-type]
        for w, b, (A, B, scale) in linears
    ]
    exact = wide(x)
    assert exact is not None
    return exact, twins


@pytest.mark.parametrize("read", [(0, 1, 2), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_torchs_within_its_own_error(
    backend: Backend, dtype: torch.dtype, trained: bool, read: tuple[int, ...]
) -> None:
    """Also where some of the outputs are not read."""
    x = torch.randn(2, 3, FEATURES).to(backend.device, dtype).requires_grad_()
    linears = make_linears(backend.device, dtype, dtype, trained=trained)
    wide_x, wide = in_float64(x, linears)
    ys = sibling_linears(x, linears, dtype, implementation=backend.implementation)  # type: ignore[arg-type]
    theirs, exact = one_by_one(x, linears), one_by_one(wide_x, wide)
    unit = torch.finfo(dtype).eps
    for y, other, true in zip(ys, theirs, exact, strict=True):
        # the rounding of partial sums enters every output
        assert_within_budget(y, other, true.detach(), unit * true.detach().abs().max())
    dys = [torch.randn_like(ys[i]) for i in read]
    found, expected, d_exact = (
        torch.autograd.grad([outputs[i] for i in read], trained_of(*of), grads, allow_unused=True)
        for outputs, of, grads in (
            (ys, (x, linears), dys),
            (theirs, (x, linears), dys),
            (exact, (wide_x, wide), [dy.double() for dy in dys]),
        )
    )
    for mine, other, true in zip(found, expected, d_exact, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert_within_budget(mine, other, true, unit * true.abs().max())


def test_wider_adapters_and_autocast_get_gradients_of_their_own_dtype(backend: Backend) -> None:
    x = torch.randn(2, 3, FEATURES, device=backend.device).requires_grad_()
    linears = make_linears(backend.device, torch.float32, torch.float32)
    low = torch.bfloat16
    ys = sibling_linears(x, linears, low, implementation=backend.implementation)  # type: ignore[arg-type]
    assert all(y.dtype == low for y in ys)
    with torch.autocast(backend.device, low):
        theirs = one_by_one(x, linears)
    wide_x, wide = in_float64(x, linears)
    exact, dys = one_by_one(wide_x, wide), [torch.randn_like(y) for y in ys]
    inputs = trained_of(x, linears)
    found = torch.autograd.grad(ys, inputs, dys)
    expected = torch.autograd.grad(theirs, inputs, dys)
    d_exact = torch.autograd.grad(exact, trained_of(wide_x, wide), [dy.double() for dy in dys])
    for given, mine, other, true in zip(inputs, found, expected, d_exact, strict=True):
        assert mine.dtype == given.dtype
        assert_within_budget(mine, other, true, torch.finfo(low).eps * true.abs().max())


def test_saved_is_what_the_linears_save_one_by_one(backend: Backend) -> None:
    """x once, and low of each, with its rank padded."""
    x = torch.randn(4, FEATURES, device=backend.device, dtype=torch.bfloat16).requires_grad_()
    linears = make_linears(backend.device, torch.bfloat16, torch.float32)
    ys, together = saved_storages(lambda: sibling_linears(x, linears, torch.bfloat16))
    one, apart = saved_storages(
        lambda: [recast_linear(x, w, b, torch.bfloat16, low) for w, b, low in linears]
    )
    assert sum(together.values()) == sum(apart.values())
    assert len(one) == len(ys)


@pytest.mark.parametrize("trains", ["x", "lora_A", "lora_B"])
def test_one_part_trains(trains: str) -> None:
    """What no gradient asks for is not saved, so that an optimizer may have written it."""
    x = torch.randn(4, FEATURES, dtype=torch.float64, requires_grad=trains == "x")
    linears = make_linears("cpu", torch.float64, torch.float64)
    for one in linears:
        one.adapter.lora_A.requires_grad_(trains == "lora_A")
        one.adapter.lora_B.requires_grad_(trains == "lora_B")
    inputs = trained_of(x, linears)
    expected = torch.autograd.grad(torch.cat(one_by_one(x, linears), 1).square().sum(), inputs)
    y = torch.cat(sibling_linears(x, linears, torch.float64), 1)
    with torch.no_grad():
        written = {"x": [], "lora_A": [one.adapter.lora_A for one in linears], "lora_B": [x]}[
            trains
        ]
        written += [] if trains == "x" else [one.weight for one in linears]
        for tensor in written:
            tensor.add_(1)
    for mine, other in zip(torch.autograd.grad(y.square().sum(), inputs), expected, strict=True):
        assert_close(mine, other, trains)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(4, FEATURES, requires_grad=True)
    ys = sibling_linears(x, make_linears("cpu", torch.float32, torch.float32), torch.float32)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(ys[0].square().sum(), x, create_graph=True)


def test_no_rows_give_no_rows() -> None:
    x = torch.randn(0, FEATURES, requires_grad=True)
    linears = make_linears("cpu", torch.float32, torch.float32)
    ys = sibling_linears(x, linears, torch.float32)
    assert [tuple(y.shape) for y in ys] == [(0, outputs) for outputs, _ in SIZES]
    sum(y.sum() for y in ys).backward()
    grad = linears[0].adapter.lora_A.grad
    assert grad is not None and not grad.any()


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_siblings_are_those_of_each(
    backend: Backend, given: torch.dtype, dtype: torch.dtype
) -> None:
    ops = module(backend.implementation)
    pairs = [one.adapter[:2] for one in make_linears(backend.device, given, given)]
    As, Bs = map(list, zip(*pairs, strict=True))
    with torch.no_grad():
        together, found = ops.sibling_weights(As, Bs, dtype)
        apart = [ops.adapter_weights(*pair, dtype) for pair in pairs]
        assert torch.equal(together, torch.cat([lora_A for lora_A, _ in apart]))
        assert all(map(torch.equal, found, [lora_B for _, lora_B in apart]))
        none, found = ops.sibling_weights([None] * 3, Bs, dtype)
        assert none is None and all(map(torch.equal, found, [lora_B for _, lora_B in apart]))
