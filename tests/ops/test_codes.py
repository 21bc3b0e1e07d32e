"""codes_activation: framework's forward, step-function derivative, one to four bits per element."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import STEP_BITS, STEP_TABLES
from lowmem_patch.functional import codes_activation
from tests.ops.conftest import INTERPRETED, Backend
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (7,), (8,), (3, 5, 37), (2, 1024), (4099,), (0, 16)]


EXACT = [kind for kind, tables in STEP_TABLES.items() if tables[2].exact]
APPROXIMATE = [kind for kind in STEP_TABLES if kind not in EXACT]
# exact tables stand for every number of bits
TABLES = [(kind, bits) for kind in APPROXIMATE for bits in STEP_BITS] + [(k, 1) for k in EXACT]


def step_derivative(x: Tensor, kind: str, bits: int = 2) -> Tensor:
    """h~'(x) written as the paper does, without codes."""
    table = STEP_TABLES[kind][bits]
    derivative = torch.full_like(x, table.levels[0])
    for threshold, slope in zip(table.thresholds, table.slopes, strict=True):
        derivative = derivative + slope * (x > threshold).to(x.dtype)
    if table.cyclic:
        derivative = torch.where(x >= table.thresholds[-1], table.levels[0], derivative)
    return derivative


# the interpreter takes each table in one dtype, and all numbers of bfloat16 below
STEPS = [
    (kind, bits, dtype)
    for i, (kind, bits) in enumerate(TABLES)
    for k, dtype in enumerate(DTYPES)
    if not INTERPRETED or (i + i // len(DTYPES)) % len(DTYPES) == k
]


@pytest.mark.parametrize(("kind", "bits", "dtype"), STEPS, ids=str)
def test_codes_give_the_step_tables_derivative(
    backend: Backend, kind: str, bits: int, dtype: torch.dtype
) -> None:
    # the interpreter takes every other of these shapes with each table
    of = TABLES.index((kind, bits)) % 2
    for shape in SHAPES[of::2] if INTERPRETED else SHAPES:
        _judge_step(backend, kind, bits, dtype, shape)


def _judge_step(
    backend: Backend, kind: str, bits: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (4 * torch.randn(shape)).to(backend.device, dtype).requires_grad_()
    dy = torch.randn(shape).to(backend.device, dtype)
    y = codes_activation(x, kind, bits, implementation=backend.implementation)
    y.backward(dy)
    wide = x.detach().double()
    assert y.is_contiguous()
    assert_within_budget(y, reference.activate(x.detach(), kind), reference.activate(wide, kind))
    # float32 decides on which side of a threshold an element lies
    slope = step_derivative(x.detach().float(), kind, bits).double()
    assert_within_budget(x.grad, (dy.double() * slope).to(dtype), dy.double() * slope)


@pytest.mark.parametrize(("kind", "bits"), TABLES)
def test_float64_runs_on_the_reference(kind: str, bits: int) -> None:
    x = torch.randn(33, dtype=torch.float64, requires_grad=True)
    codes_activation(x, kind, bits).sum().backward()
    exact = step_derivative(x.detach(), kind, bits)
    assert float((x.grad - exact).abs().max()) < 1e-14


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_one_bit_is_exact_where_the_derivative_has_two_values(
    backend: Backend, kind: str, dtype: torch.dtype
) -> None:
    kinks = torch.tensor([-6.0, -3.0, -0.0, 0.0, 3.0, 6.0, float("inf"), -float("inf")])
    x = torch.cat((kinks, 4 * torch.randn(1000))).to(backend.device, dtype).requires_grad_()
    if dtype == torch.float64 and backend.implementation == "triton":
        pytest.skip("float64 runs on the reference")
    y = codes_activation(x, kind, 4, implementation=backend.implementation)
    plain = reference.activate(x, kind)
    assert torch.equal(y, plain) or dtype != torch.float64
    dy = torch.randn(x.shape).to(backend.device, dtype)
    (ours,), (theirs,) = (torch.autograd.grad(result, x, dy) for result in (y, plain))
    assert_within_budget(ours, theirs, theirs.double())
    assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("lost", [float("inf"), float("nan"), 1.0])
def test_exact_codes_drop_what_torch_drops(backend: Backend, kind: str, lost: float) -> None:
    """sqrt(relu(x)) has an infinite gradient where relu(x) is 0, and torch selects 0 there; where x is
    undefined, ReLU passes the gradient on."""
    x = torch.cat((torch.linspace(-8, 8, 37), torch.full((2,), float("nan"))))
    x = x.to(backend.device).requires_grad_()
    dy = torch.full_like(x, lost)
    with numpy.errstate(all="ignore"):  # of the interpreter
        y = codes_activation(x, kind, 1, implementation=backend.implementation)
        ours, theirs = (
            torch.autograd.grad(result, x, dy)[0] for result in (y, reference.activate(x, kind))
        )
    # a slope of hardsigmoid's is rounded in another way
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "bits"), TABLES)
def test_values_far_out_and_at_thresholds(backend: Backend, kind: str, bits: int) -> None:
    thresholds = torch.tensor(STEP_TABLES[kind][bits].thresholds)
    x = torch.cat((thresholds, thresholds.nextafter(torch.tensor(9.0)), torch.tensor([-0.0, 0.0])))
    x = torch.cat((x, torch.tensor([-1e4, 1e4, -90.0, 90.0, 1e-30]))).to(backend.device)
    x.requires_grad_()
    y = codes_activation(x, kind, bits, implementation=backend.implementation)
    y.sum().backward()
    assert bool(y.isfinite().all())
    exact = step_derivative(x.detach(), kind, bits).double()
    assert_within_budget(x.grad, exact.float(), exact)


@pytest.mark.parametrize("bits", STEP_BITS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 4096])
def test_saves_so_many_bits_per_element(backend: Backend, n: int, bits: int) -> None:
    x = torch.randn(n, device=backend.device).bfloat16().requires_grad_()
    _, saved = saved_storages(
        lambda: codes_activation(x, "gelu", bits, implementation=backend.implementation)
    )
    assert list(saved.values()) == [bits * ((n + 7) // 8)]


@pytest.mark.parametrize("kind", EXACT)
def test_exact_tables_save_one_bit_whatever_is_asked_for(backend: Backend, kind: str) -> None:
    x = torch.randn(1000, device=backend.device, requires_grad=True)
    _, saved = saved_storages(
        lambda: codes_activation(x, kind, 3, implementation=backend.implementation)
    )
    assert list(saved.values()) == [125]


def _ops(backend: Backend) -> Any:
    if backend.implementation == "triton":
        from lowmem_patch import kernels

        return kernels
    return reference


def test_codes_lie_first_lowest(backend: Backend) -> None:
    x = torch.tensor([-9.0, -1.0, 1.0, 9.0, 9.0, 9.0, -9.0, 1.0, 1.0], device=backend.device)
    ops = _ops(backend)
    _, codes = ops.codes_forward(x, "gelu", 2)
    assert codes.tolist() == [0b11100100, 0b10001111, 0b00000010, 0]
    _, codes = ops.codes_forward(x, "gelu", 1)
    assert codes.tolist() == [0b10111100, 0b1]
    # 0 to 7 in 24 bits: the lower 16 of all groups before the higher 8
    places = [-9.0, *(t + 1e-3 for t in STEP_TABLES["gelu"][3].thresholds), 9.0]
    _, codes = ops.codes_forward(torch.tensor(places, device=backend.device), "gelu", 3)
    assert codes.tolist() == [0x88, 0xC6, 0b111, 0, 0xFA, 0]
    places = [-9.0, *(t + 1e-3 for t in STEP_TABLES["gelu"][4].thresholds)]
    _, codes = ops.codes_forward(torch.tensor(places, device=backend.device), "gelu", 4)
    assert codes.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


@pytest.mark.parametrize(("kind", "bits"), TABLES)
def test_either_backward_reads_either_forward(backend: Backend, kind: str, bits: int) -> None:
    if backend.implementation != "triton":
        pytest.skip("compares the kernels with the reference")
    from lowmem_patch import kernels

    x, dy = 3 * torch.randn(2, 5003, device=backend.device)
    _, ours = kernels.codes_forward(x, kind, bits)
    _, theirs = reference.codes_forward(x, kind, bits)
    assert torch.equal(ours, theirs)
    for codes in (ours, theirs):
        assert torch.equal(
            kernels.codes_backward(dy, codes, kind, bits, torch.float32),
            reference.codes_backward(dy, codes, kind, bits, torch.float32),
        )


def every_half(dtype: torch.dtype) -> Tensor:
    """All 65536 numbers of a half format: infinities, subnormals and NaN among them."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    if INTERPRETED and dtype == torch.bfloat16:
        # Triton's interpreter reads powers of two among these as 0
        x[x.abs() < torch.finfo(dtype).tiny] = 0
    return x


# the interpreter takes each kind once
HALVES = [
    (kind, bits, torch.bfloat16)
    for i, kind in enumerate(APPROXIMATE)
    for bits in STEP_BITS
    if bits > 1 and (not INTERPRETED or bits == 2 + i % 3)
]
HALVES += [(kind, bits, torch.float16) for kind in ("gelu", "sigmoid") for bits in (3, 4)]


@pytest.mark.parametrize(("kind", "bits", "dtype"), HALVES)
def test_codes_of_every_half_number_are_the_references(
    backend: Backend,
    kind: str,
    bits: int,
    dtype: torch.dtype,
) -> None:
    if backend.implementation != "triton":
        pytest.skip("compares the kernels with the reference")
    from lowmem_patch import kernels

    x = every_half(dtype).to(backend.device)
    with numpy.errstate(all="ignore"):  # an interpreted activation of infinities
        _, ours = kernels.codes_forward(x, kind, bits)
    _, theirs = reference.codes_forward(x, kind, bits)
    assert torch.equal(ours, theirs)
    dy = torch.ones_like(x, dtype=torch.float32)
    assert torch.equal(
        kernels.codes_backward(dy, ours, kind, bits, torch.float32),
        reference.codes_backward(dy, ours, kind, bits, torch.float32),
    )


@pytest.mark.skipif(INTERPRETED, reason="numbers of the tables, no kernels")
@pytest.mark.parametrize(("kind", "bits"), [pair for pair in TABLES if pair[1] > 2])
def test_no_bin_has_two_thresholds(kind: str, bits: int) -> None:
    """And none lies so near the end of its bin that rounding could put it into another."""
    bins_of = pytest.importorskip("lowmem_patch.kernels._bins").bins_of
    table = STEP_TABLES[kind][bits]
    bins = bins_of(table)
    thresholds = torch.tensor(table.thresholds[: len(table.levels) - 1], dtype=torch.float64)
    places = thresholds * bins.scale + bins.shift
    numbers = places.round().clamp(0, bins.number - 1)
    assert numbers.unique().numel() == len(thresholds)
    # float32 is off by less than this part of the largest place
    assert float((places - places.floor() - 0.5).abs().min()) > 100 * bins.number * 2**-24


@pytest.mark.skipif(INTERPRETED, reason="numbers of the tables, no kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "bits"), TABLES)
def test_half_thresholds_divide_half_numbers_as_the_exact_ones(
    kind: str, bits: int, dtype: torch.dtype
) -> None:
    bins = pytest.importorskip("lowmem_patch.kernels._bins")
    table = STEP_TABLES[kind][bits]
    thresholds = table.thresholds[: len(table.levels) - 1]
    every = every_half(dtype)[:, None]
    above = every > bins.largest_not_above(thresholds, dtype)
    assert torch.equal(above, every.float() > torch.tensor(thresholds))


def test_strided_input_and_gradient(backend: Backend) -> None:
    base = torch.randn(5, 24, device=backend.device)
    x = base.t()[::2].requires_grad_()
    dy = torch.randn(5, 12, device=backend.device).t()
    codes_activation(x, "silu", implementation=backend.implementation).backward(dy)
    exact = dy.double() * step_derivative(x.detach(), "silu").double()
    assert_within_budget(x.grad, exact.float(), exact)


@pytest.mark.parametrize("kind", STEP_TABLES)
def test_without_gradients_it_is_the_framework_function(backend: Backend, kind: str) -> None:
    x = torch.randn(64, device=backend.device).bfloat16()
    plain = reference.activate(x, kind)
    y, saved = saved_storages(
        lambda: codes_activation(x, kind, implementation=backend.implementation)
    )
    assert torch.equal(y, plain)
    assert not saved
    with torch.no_grad():
        x.requires_grad_()
        assert torch.equal(codes_activation(x, kind, implementation=backend.implementation), plain)


def test_autocast_keeps_the_input_dtype(backend: Backend) -> None:
    x = torch.randn(16, device=backend.device, requires_grad=True)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = codes_activation(x, "gelu", implementation=backend.implementation)
    assert y.dtype == torch.float32


@pytest.mark.skipif(INTERPRETED, reason="checks arguments, not kernels")
def test_errors_name_the_dtype() -> None:
    with pytest.raises(TypeError, match=r"torch\.complex64"):
        codes_activation(torch.ones(3, dtype=torch.complex64, requires_grad=True), "gelu")
