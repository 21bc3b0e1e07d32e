"""More than 2^31 elements: offsets must not wrap. On a GPU only, where such tensors live."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import (
    NormSettings,
    activation,
    codes_activation,
    ms_norm,
    packed_dropout,
    turned,
)
from lowmem_patch.reference import unpack_bool

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 2**19 + 8, 4096  # 2^31 + 2^15 elements
TAIL = slice(-8, None)  # rows whose offsets lie beyond 2^31
TAIL_BYTES = 8 * COLUMNS // 8  # of their flags


def large() -> Tensor:
    torch.manual_seed(0)
    x = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    return x.normal_().requires_grad_()


def gradient(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y, x, torch.ones((), dtype=y.dtype, device="cuda").expand_as(y))
    return found


def test_codes_beyond_32_bit_indices_are_right() -> None:
    x = large()
    y = codes_activation(x, "gelu")
    tail = x.detach()[TAIL].clone().requires_grad_()
    expected = codes_activation(tail, "gelu")
    assert torch.equal(y[TAIL], expected)
    assert torch.equal(gradient(y, x)[TAIL], gradient(expected, tail))


def test_norms_beyond_32_bit_indices_are_right() -> None:
    x = large()
    y = ms_norm(x, None, None, NormSettings(1e-5))[0]
    exact = F.layer_norm(x.detach()[TAIL].double(), (COLUMNS,), eps=1e-5)
    assert (y[TAIL].double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert torch.isfinite(gradient(y, x)[TAIL]).all()


def test_gated_products_beyond_32_bit_indices_are_right() -> None:
    x = large()
    y = activation(x, "silu", x)
    tail = x.detach()[TAIL].clone().requires_grad_()
    expected = activation(tail, "silu", tail)
    assert torch.equal(y[TAIL], expected)
    assert torch.equal(gradient(y, x)[TAIL], gradient(expected, tail))


def test_dropouts_beyond_32_bit_indices_are_right() -> None:
    x = large()
    y, bits = packed_dropout(x, 0.5)
    stays = y[TAIL] != 0
    mask = unpack_bool(bits[-TAIL_BYTES:], stays.shape)
    assert torch.equal(mask | (x[TAIL] == 0), stays | (x[TAIL] == 0))
    assert torch.equal(gradient(y, x)[TAIL], 2.0 * mask)


@pytest.mark.parametrize("outermost", ["position", "head", "batch"])
def test_rotations_beyond_32_bit_indices_are_right(outermost: str) -> None:
    x = large()
    if outermost == "position":
        q = x.view(1, ROWS, 32, 128).transpose(1, 2)
    else:
        q = x.view(1, 32, ROWS, 128) if outermost == "head" else x.view(32, 1, ROWS, 128)
    cos, sin = torch.randn(2, 1, ROWS, 128, dtype=torch.bfloat16, device="cuda").unbind()
    y = turned(q, cos, sin)
    tail = q.detach()[:, :, TAIL].clone().requires_grad_()
    expected = turned(tail, cos[:, TAIL], sin[:, TAIL])
    assert torch.equal(y[:, :, TAIL], expected)
    assert torch.equal(gradient(y, q)[:, :, TAIL], gradient(expected, tail))
