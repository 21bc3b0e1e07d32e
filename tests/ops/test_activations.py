"""Activations and gated products: exact, keeping nothing but their inputs."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import ACTIVATION_KINDS
from lowmem_patch.functional import activation, codes_activation
from tests.ops.conftest import INTERPRETED, Backend, part
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages, storage_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (3, 5, 37), (4, 1, 1030), (0, 16)]


def gradients(y: Tensor, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, dy.to(y.dtype))


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"), part(ACTIVATION_KINDS, DTYPES, SHAPES), ids=str
)
def test_activation_is_torchs_within_its_own_error(
    backend: Backend, kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (3 * torch.randn(shape)).to(backend.device, dtype).requires_grad_()
    dy = torch.randn(shape).to(backend.device, dtype)
    wide = x.detach().double().requires_grad_()
    ours = activation(x, kind, implementation=backend.implementation)
    theirs = reference.activate(x, kind)
    exact = reference.activate(wide, kind)
    assert_within_budget(ours, theirs, exact)
    (d_ours,) = gradients(ours, (x,), dy)
    (d_theirs,) = gradients(theirs, (x,), dy)
    (d_exact,) = gradients(exact, (wide,), dy)
    assert_within_budget(d_ours, d_theirs, d_exact)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activation_saves_its_input_alone(backend: Backend, kind: str) -> None:
    x = torch.randn(4, 9, device=backend.device, requires_grad=True)
    for implementation in ("auto", backend.implementation):
        _, saved = saved_storages(lambda i=implementation: activation(x, kind, implementation=i))
        assert set(saved) == {storage_of(x)}


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "packed"),
    part(ACTIVATION_KINDS, DTYPES, SHAPES, [False, True]),
    ids=str,
)
def test_gated_product_is_torchs_within_its_own_error(
    backend: Backend, kind: str, dtype: torch.dtype, shape: tuple[int, ...], packed: bool
) -> None:
    both = (2 * torch.randn(*shape[:-1], 2 * shape[-1])).to(backend.device, dtype)
    gate, up = both.chunk(2, -1)
    if not packed:
        gate, up = gate.contiguous(), up.contiguous()
    gate, up = gate.requires_grad_(), up.requires_grad_()
    dy = torch.randn(shape).to(backend.device, dtype)
    wide = (gate.detach().double().requires_grad_(), up.detach().double().requires_grad_())
    ours = activation(gate, kind, up, implementation=backend.implementation)
    theirs = reference.activate(gate, kind) * up
    exact = reference.activate(wide[0], kind) * wide[1]
    assert ours.is_contiguous()
    assert_within_budget(ours, theirs, exact)
    found = gradients(ours, (gate, up), dy)
    expected = gradients(theirs, (gate, up), dy)
    for d_ours, d_theirs, d_exact in zip(found, expected, gradients(exact, wide, dy), strict=True):
        assert_within_budget(d_ours, d_theirs, d_exact)


def test_glu_saves_the_given_views(backend: Backend) -> None:
    packed = torch.randn(3, 2, 512, device=backend.device, requires_grad=True)
    gate, up = packed.chunk(2, -1)
    y, saved = saved_storages(
        lambda: activation(gate, "silu", up, implementation=backend.implementation)
    )
    assert set(saved) == {storage_of(packed)}
    y.sum().backward()
    assert bool(packed.grad.isfinite().all())


def test_glu_reads_any_strides(backend: Backend) -> None:
    gate = torch.randn(3, 130, 4, device=backend.device).transpose(1, 2).requires_grad_()
    up = torch.randn(1, 4, 130, device=backend.device).expand(3, 4, 130)
    y = activation(gate, "gelu", up, implementation=backend.implementation)
    exact = reference.activate(gate.double(), "gelu") * up.double()
    assert_within_budget(y, exact.float(), exact)
    dy = torch.randn(4, 3, 130, device=backend.device).transpose(0, 1)
    (ours,) = torch.autograd.grad(y, gate, dy)
    (d_exact,) = torch.autograd.grad(exact, gate, dy.double())
    assert_within_budget(ours, d_exact, d_exact.double())


def test_glu_takes_each_tensor_by_its_own_stride(backend: Backend) -> None:
    gate = torch.randn(6, 2 * 136, device=backend.device)[:, :136].requires_grad_()
    up = torch.randn(6, 3 * 136, device=backend.device)[:, 136 : 2 * 136].requires_grad_()
    dy = torch.randn(6, 136, device=backend.device)
    y = activation(gate, "silu", up, implementation=backend.implementation)
    exact = reference.activate(gate.double(), "silu") * up.double()
    assert_within_budget(y, exact.float(), exact)
    for mine, true in zip(
        gradients(y, (gate, up), dy), gradients(exact, (gate, up), dy), strict=True
    ):
        assert_within_budget(mine, true, true.double())


def test_glu_promotes_as_the_product_would(backend: Backend) -> None:
    gate = torch.randn(4, 16, device=backend.device, requires_grad=True)
    up = torch.randn(4, 16, device=backend.device).bfloat16().requires_grad_()
    y = activation(gate, "silu", up, implementation=backend.implementation)
    assert y.dtype == torch.float32
    d_gate, d_up = gradients(y, (gate, up), torch.ones_like(y))
    assert (d_gate.dtype, d_up.dtype) == (torch.float32, torch.bfloat16)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        assert (
            activation(gate, "silu", up, implementation=backend.implementation).dtype
            == torch.float32
        )


def test_glu_with_one_frozen_side(backend: Backend) -> None:
    gate, up = torch.randn(2, 8, device=backend.device).unbind()
    up.requires_grad_()
    activation(gate, "silu", up, implementation=backend.implementation).sum().backward()
    exact = torch.nn.functional.silu(gate.double())
    assert_within_budget(up.grad, exact.float(), exact)
    assert gate.grad is None


@pytest.mark.skipif(INTERPRETED, reason="checks arguments, not kernels")
def test_errors_name_the_dtype() -> None:
    with pytest.raises(TypeError, match=r"torch\.complex64"):
        activation(torch.ones(3, dtype=torch.complex64, requires_grad=True), "silu")


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
def test_integers_are_torchs() -> None:
    x = torch.arange(-2, 3)
    for y in (activation(x, "relu"), codes_activation(x, "relu", 1)):
        assert torch.equal(y, torch.relu(x))


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nan_stays_and_values_far_out_are_torchs(
    backend: Backend, kind: str, dtype: torch.dtype
) -> None:
    values = [float("nan"), float("inf"), 100.0, -100.0, 2e4, -2e4]
    x = torch.tensor(values, dtype=dtype, device=backend.device).requires_grad_()
    with numpy.errstate(all="ignore"):  # of the interpreter
        y = activation(x, kind, implementation=backend.implementation)
        expected = reference.activate(x, kind)
        found, truth = (torch.autograd.grad(result.sum(), x)[0] for result in (y, expected))
    assert bool(y[0].isnan())
    known = ~expected.isnan()  # torch's GELU of infinity is NaN on some processors
    assert torch.allclose(y[known], expected[known])
    assert torch.allclose(found[2:], truth[2:])


@pytest.mark.parametrize("kind", ["relu", "relu_squared", "relu6", "hardsigmoid"])
@pytest.mark.parametrize("lost", [float("inf"), float("nan")])
def test_a_gradient_is_dropped_where_torch_selects_zero(
    backend: Backend, kind: str, lost: float
) -> None:
    x = torch.linspace(-8, 8, 37).to(backend.device).requires_grad_()
    dy = torch.full_like(x, lost)
    with numpy.errstate(all="ignore"):  # of the interpreter
        y = activation(x, kind, implementation=backend.implementation)
        ours, theirs = (
            torch.autograd.grad(result, x, dy)[0] for result in (y, reference.activate(x, kind))
        )
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(ours.isnan(), theirs.isnan())
