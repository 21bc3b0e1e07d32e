"""Dropout from bits: torch's own numbers and gradients, one bit for each element, x once for a Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import (
    activation,
    dropout_linear,
    packed_dropout,
)
from lowmem_patch.functional._implementation import module
from lowmem_patch.reference import unpack_bool
from tests.ops.conftest import INTERPRETED, Backend, part
from tests.support.saved import saved_storages, storage_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(1,), (7,), (8,), (3, 5, 37), (4099,), (2, 1024)]


def whole(*shape: int) -> Tensor:
    return torch.randn(shape)


def transposed(*shape: int) -> Tensor:
    return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))


def half_of_rows(*shape: int) -> Tensor:
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


def assert_same(found: Tensor, expected: Tensor, *dtypes: torch.dtype) -> None:
    """Equal bits; where bfloat16 is rounded to, Triton's interpreter cuts off, twice at most."""
    assert found.dtype == expected.dtype
    if INTERPRETED and torch.bfloat16 in dtypes:
        error = (found.float() - expected.float()).abs()
        assert bool((error <= 2 * torch.finfo(torch.bfloat16).eps * expected.abs()).all())
    else:
        assert torch.equal(found, expected)


def seeded(function: Callable[..., Any], *args: Any) -> tuple[Any, Tensor]:
    """The result, and the next random number."""
    torch.manual_seed(11)
    result = function(*args)
    return result, torch.rand((), device=args[0].device)


def packed(x: Tensor, p: float) -> Tensor:
    return packed_dropout(x, p)[0]


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "p"),
    part(SHAPES, [whole, transposed, half_of_rows], DTYPES, [0.05, 0.1, 0.5, 0.9]),
)
def test_every_bit_is_torchs(
    backend: Backend, shape: tuple[int, ...], layout: Any, dtype: torch.dtype, p: float
) -> None:
    x = layout(*shape).to(backend.device, dtype)
    mine, theirs = x.detach().requires_grad_(), x.detach().requires_grad_()
    (y, later), (expected, later_too) = seeded(packed, mine, p), seeded(F.dropout, theirs, p)
    assert torch.equal(y, expected) and y.dtype == dtype
    assert torch.equal(later, later_too)  # as many numbers were drawn
    dy = torch.randn(shape).to(backend.device, dtype)
    (found,), (exact,) = (torch.autograd.grad(a, b, dy) for a, b in ((y, mine), (expected, theirs)))
    assert_same(found, exact, dtype)


def test_infinity_and_nan_are_as_in_torch(backend: Backend) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1.0] * 9, device=backend.device)
    mine, theirs = x.detach().requires_grad_(), x.detach().requires_grad_()
    (y, _), (expected, _) = seeded(packed, mine, 0.5), seeded(F.dropout, theirs, 0.5)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)  # bits, NaN too
    with numpy.errstate(invalid="ignore"):  # of an interpreted kernel
        (found,) = torch.autograd.grad(y, mine, x)
    (exact,) = torch.autograd.grad(expected, theirs, x)
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)  # bits, NaN too


@pytest.mark.parametrize("shape", [*SHAPES, (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_kernel_and_reference_agree_to_the_bit(
    backend: Backend, source: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape).to(backend.device, source)
    mask = (torch.rand(shape) > 0.3).to(backend.device)
    bits = module(backend.implementation).pack_bool(mask)
    assert torch.equal(bits, reference.pack_bool(mask))
    assert bits.numel() == (x.numel() + 7) // 8
    assert torch.equal(unpack_bool(bits, shape), mask)
    for out_dtype in (torch.float32, torch.bfloat16):
        settings = (x, bits, 1 / 0.7, dtype, out_dtype)
        y = module(backend.implementation).drop(*settings)
        assert_same(y, reference.drop(*settings), dtype, out_dtype)
        assert y.dtype == out_dtype and y.is_contiguous()


@pytest.mark.parametrize("size", [8, 9])  # with and without padding of the bits
def test_a_dropout_keeps_bits_alone(size: int) -> None:
    x = torch.randn(5, size, requires_grad=True)
    y, saved = saved_storages(lambda: packed(x, 0.3))
    assert sum(saved.values()) == (5 * size + 7) // 8
    z = y
    z += 1  # like any other op's result
    z.sum().backward()
    assert x.grad is not None


KINDS = [None, "silu", "gelu"]
NARROW = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16 off"),
)


@pytest.mark.parametrize("frozen", ["", "weight", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_behind_it(backend: Backend, kind: Any, dtype: torch.dtype, frozen: str) -> None:
    """The bits of torch's own Linear, where value and source are of one dtype."""
    x = torch.randn(3, 4, 11).to(backend.device, dtype).requires_grad_(frozen != "input")
    up = torch.randn(3, 4, 11).to(backend.device, dtype).requires_grad_()
    weight = torch.randn(5, 11).to(backend.device, dtype).requires_grad_(frozen != "weight")
    bias = torch.randn(5).to(backend.device, dtype).requires_grad_()
    sources = (x,) if kind != "silu" else (x, up)

    def hidden() -> Tensor:
        if kind is None:
            return x
        return activation(x, kind, up) if kind == "silu" else reference.activate(x, kind)

    def ours() -> Tensor:
        h = hidden()
        value, bits = packed_dropout(h, 0.3)
        return dropout_linear(value, sources, bits, weight, bias, 0.3, kind, dtype)

    (y, saved), _ = seeded(lambda _: saved_storages(ours), x)
    expected, _ = seeded(lambda _: F.linear(F.dropout(hidden(), 0.3), weight, bias), x)
    assert torch.equal(y, expected)
    known = {storage_of(tensor) for tensor in (x, up, weight)}
    assert sum(size for key, size in saved.items() if key not in known) == (
        (x.numel() + 7) // 8 if frozen != "weight" or x.requires_grad else 0
    )
    inputs = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
    dy = torch.randn_like(y)
    exactly = {} if backend.device == "cuda" else {"rtol": 0, "atol": 0}  # cuBLAS may sum otherwise
    for mine, other in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(mine, other, **exactly)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16 off")
def test_a_linear_in_another_dtype_repeats_the_casts() -> None:
    """A bf16 tensor, dropped in float32, multiplied in bf16: an adapter in float32 under autocast."""
    x = torch.randn(6, 16).bfloat16().requires_grad_()
    weight = torch.randn(4, 16, requires_grad=True)

    def ours() -> Tensor:
        wide = x.float()
        value, bits = packed_dropout(wide, 0.3)
        return dropout_linear(value, (x,), bits, weight, None, 0.3, None, torch.bfloat16)

    def plain() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.dropout(x.float(), 0.3), weight)

    (y, saved), _ = seeded(lambda _: saved_storages(ours), x)
    expected, _ = seeded(lambda _: plain(), x)
    assert torch.equal(y, expected)
    assert set(saved) - {storage_of(x), storage_of(weight)} and sum(saved.values()) == (
        x.numel() * 2 + x.numel() // 8 + weight.numel() * 4
    )
    dy = torch.randn_like(y)
    for mine, other in zip(
        torch.autograd.grad(y, (x, weight), dy),
        torch.autograd.grad(expected, (x, weight), dy),
        strict=True,
    ):
        assert mine.dtype == other.dtype and torch.equal(mine, other)


def test_second_derivatives_are_refused_by_name() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    value, bits = packed_dropout(x, 0.3)
    y = dropout_linear(value, (x,), bits, weight, None, 0.3, None, torch.float32)
    for result, name in ((value, "packed_dropout"), (y, "recomputed_linear")):
        with pytest.raises(DoubleBackwardError, match=name):
            torch.autograd.grad(
                result.square().sum(), value if result is y else x, create_graph=True
            )


def test_shapes_that_do_not_fit_are_named() -> None:
    x = torch.randn(3, 8)
    value, bits = packed_dropout(x, 0.3)
    with pytest.raises(ValueError, match=r"must be \[O, F\]"):
        dropout_linear(value, (x,), bits, torch.randn(8, 4), None, 0.3, None, torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="the same without kernels")
def test_one_generator_state_gives_one_mask() -> None:
    x = torch.randn(100)
    state = torch.get_rng_state()
    _, first = packed_dropout(x, 0.5)
    _, other = packed_dropout(x, 0.5)
    torch.set_rng_state(state)
    _, again = packed_dropout(x, 0.5)
    assert torch.equal(first, again) and not torch.equal(first, other)
