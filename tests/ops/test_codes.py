"""codes_activation: framework's forward, step-function derivative, two bits per element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import codes_activation
from tests.ops.conftest import INTERPRETED, Backend
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (7,), (8,), (3, 5, 37), (2, 1024), (4099,), (0, 16)]


def step_derivative(x: Tensor, kind: str) -> Tensor:
    """h~'(x) written as the paper does, without codes."""
    table = STEP_TABLES[kind]
    derivative = torch.zeros_like(x)
    for threshold, slope in zip(table.thresholds, table.slopes, strict=True):
        derivative = derivative + slope * (x > threshold).to(x.dtype)
    return derivative


@pytest.mark.parametrize("kind", STEP_TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_give_the_step_tables_derivative(
    backend: Backend, kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (4 * torch.randn(shape)).to(backend.device, dtype).requires_grad_()
    dy = torch.randn(shape).to(backend.device, dtype)
    y = codes_activation(x, kind, implementation=backend.implementation)
    y.backward(dy)
    wide = x.detach().double()
    assert y.is_contiguous()
    assert_within_budget(y, reference.activate(x.detach(), kind), reference.activate(wide, kind))
    # float32 decides on which side of a threshold an element lies
    slope = step_derivative(x.detach().float(), kind).double()
    assert_within_budget(x.grad, (dy.double() * slope).to(dtype), dy.double() * slope)


@pytest.mark.parametrize("kind", STEP_TABLES)
def test_float64_runs_on_the_reference(kind: str) -> None:
    x = torch.randn(33, dtype=torch.float64, requires_grad=True)
    codes_activation(x, kind).sum().backward()
    exact = step_derivative(x.detach(), kind)
    assert float((x.grad - exact).abs().max()) < 1e-15


@pytest.mark.parametrize("kind", STEP_TABLES)
def test_values_far_out_and_at_thresholds(backend: Backend, kind: str) -> None:
    thresholds = torch.tensor(STEP_TABLES[kind].thresholds)
    x = torch.cat((thresholds, thresholds.nextafter(torch.tensor(9.0)), torch.tensor([-0.0, 0.0])))
    x = torch.cat((x, torch.tensor([-1e4, 1e4, -90.0, 90.0, 1e-30]))).to(backend.device)
    x.requires_grad_()
    y = codes_activation(x, kind, implementation=backend.implementation)
    y.sum().backward()
    assert bool(y.isfinite().all())
    exact = step_derivative(x.detach(), kind).double()
    assert_within_budget(x.grad, exact.float(), exact)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 4096])
def test_saves_two_bits_per_element(backend: Backend, n: int) -> None:
    x = torch.randn(n, device=backend.device).bfloat16().requires_grad_()
    _, saved = saved_storages(
        lambda: codes_activation(x, "gelu", implementation=backend.implementation)
    )
    assert list(saved.values()) == [2 * ((n + 7) // 8)]


def test_codes_are_four_to_a_byte_first_lowest(backend: Backend) -> None:
    if backend.implementation == "triton":
        from lowmem_patch import kernels as ops
    else:
        ops = reference
    x = torch.tensor([-9.0, -1.0, 1.0, 9.0, 9.0, 9.0, -9.0, 1.0, 1.0], device=backend.device)
    _, codes = ops.codes_forward(x, "gelu")
    assert codes.view(torch.uint8).tolist() == [0b11100100, 0b10001111, 0b00000010, 0]


def test_either_backward_reads_either_forward(backend: Backend) -> None:
    if backend.implementation != "triton":
        pytest.skip("compares the kernels with the reference")
    from lowmem_patch import kernels

    x, dy = torch.randn(2, 1003, device=backend.device).unbind()
    _, ours = kernels.codes_forward(x, "silu")
    _, theirs = reference.codes_forward(x, "silu")
    assert torch.equal(ours, theirs)
    for codes in (ours, theirs):
        assert torch.equal(
            kernels.codes_backward(dy, codes, "silu", torch.float32),
            reference.codes_backward(dy, codes, "silu", torch.float32),
        )


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
def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        codes_activation(torch.randn(16), "relu")
    with pytest.raises(TypeError, match=r"torch\.int64"):
        codes_activation(torch.arange(3), "gelu")
