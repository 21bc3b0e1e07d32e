"""A scaled output of a Linear: the gradients are those of torch's own product, whose operand nobody saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import scaled_linear
from lowmem_patch.functional._implementation import module
from tests.ops.conftest import Backend
from tests.support.judge import assert_within_budget

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "channels": ((5,), -1),
    "one": ((1,), -1),
    "a number": ((), -1),
    "padded": ((1, 1, 1, 5), -1),
    "moved": ((1, 5, 1, 1), 1),
    "moved one": ((1, 1), 1),
}


def made(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> list[Tensor]:
    """x, weight, bias and scale."""
    sizes = [(2, 3, 4, 6), (5, 6), (5,), shape]
    made = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    return made if bias else [*made[:2], *made[3:]]


def ours(x: Tensor, weight: Tensor, *rest: Tensor, channel: int, again: bool = False) -> Tensor:
    *bias, scale = rest
    given = bias[0] if bias else None
    y = F.linear(x, weight, given).movedim(-1, channel)
    recipe: Any = (torch.neg, (-x.detach(),)) if again else (None, ())
    return scaled_linear(y.detach(), scale, x, *recipe, weight, given, channel)


def theirs(x: Tensor, weight: Tensor, *rest: Tensor, channel: int) -> Tensor:
    *bias, scale = rest
    return F.linear(x, weight, bias[0] if bias else None).movedim(-1, channel) * scale


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_torchs(name: str, bias: bool, again: bool) -> None:
    shape, channel = SHAPES[name]
    tensors = made(torch.float64, shape, bias)
    expected = theirs(*tensors, channel=channel)
    found = ours(*tensors, channel=channel, again=again)
    assert torch.equal(found, expected)
    start = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(z, tensors, start) for z in (found, expected)), strict=True)
    for own, torchs in pairs:
        assert own.shape == torchs.shape
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-12)  # of float64


@pytest.mark.parametrize("frozen", range(4))
def test_a_frozen_operand_gets_no_gradient(frozen: int) -> None:
    tensors = made(torch.float64, (5,), True)
    tensors[frozen].requires_grad_(False)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    found, expected = (f(*tensors, channel=-1).sum() for f in (ours, theirs))
    for own, torchs in zip(
        torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted), strict=True
    ):
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-12)  # of float64


def test_a_scale_near_zero_has_an_exact_gradient() -> None:
    tensors = made(torch.float64, (5,), True)
    with torch.no_grad():
        tensors[3].copy_(torch.tensor([0.0, 1e-30, 1e-6, -1e-6, 1.0]))
    found, expected = (f(*tensors, channel=-1).square().sum() for f in (ours, theirs))
    pair = (torch.autograd.grad(total, tensors[3])[0] for total in (found, expected))
    torch.testing.assert_close(*pair, rtol=1e-12, atol=0)  # of float64


def test_a_product_in_bf16_has_the_dtype_that_torch_promotes_to() -> None:
    x, weight, bias, scale = made(torch.bfloat16, (5,), True)
    wide = scale.detach().float().requires_grad_()
    z = ours(x, weight, bias, wide, channel=-1)
    z.sum().backward()
    assert z.dtype == torch.float32 == wide.grad.dtype  # type: ignore[union-attr]
    assert {t.grad.dtype for t in (x, weight, bias)} == {torch.bfloat16}  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_scales_gradient_is_not_rounded_where_sums_cancel(device: str) -> None:
    """Inputs with an offset, which the bias takes away again: G is large, and its row sums are not."""
    torch.manual_seed(0)
    x = (torch.randn(2048, 64) + 8).bfloat16().to(device)
    weight, scale = torch.randn(32, 64).div(8).bfloat16().to(device), torch.ones(32, device=device)
    bias = -(weight.float() @ x.float().mean(0)).bfloat16()
    start = (torch.randn(2048, 32) + 0.5).to(device)
    found = {}
    for name, f in (("ours", ours), ("torch", theirs), ("truth", theirs)):
        to = torch.float64 if name == "truth" else torch.bfloat16
        tensors = [t.detach().to(to) for t in (x, weight, bias)]
        last = scale.detach().to(torch.float64 if name == "truth" else torch.float32)
        leaves = [t.requires_grad_() for t in (*tensors, last.clone())]
        z = f(*leaves, channel=-1)
        found[name] = torch.autograd.grad(z, leaves[3], start.to(z.dtype))[0].double()
    errors = {n: (found[n] - found["truth"]).norm().item() for n in ("ours", "torch")}
    assert errors["ours"] <= 3 * errors["torch"]  # the factor of gradients elsewhere


def test_a_second_derivative_is_an_error() -> None:
    tensors = made(torch.float64, (5,), True)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(ours(*tensors, channel=-1).sum(), tensors[0], create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "one"), [((3, 37), False), ((5, 4100), True), ((0, 8), False)])
def test_both_gradients_of_one_product(
    backend: Backend, shape: tuple[int, int], one: bool, dtype: torch.dtype
) -> None:
    products = torch.randn(shape, device=backend.device)
    weight = torch.randn(shape, device=backend.device).to(dtype)
    factors = torch.randn(1 if one else shape[0], device=backend.device).to(dtype)
    scaled_gradients = module(backend.implementation).scaled_gradients
    found = scaled_gradients(products, weight, factors, dtype)

    def written_out(p: Tensor, w: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        return (p * w).sum(1), (p * f.unsqueeze(1)).to(w.dtype)

    stock = written_out(products, weight, factors)
    truth = written_out(products.double(), weight.double(), factors.double())
    assert [one.dtype for one in found] == [torch.float32, dtype]
    for own, torchs, exact in zip(found, stock, truth, strict=True):
        assert own.shape == exact.shape
        assert_within_budget(own, torchs, exact)
    sums, absent = scaled_gradients(products, weight, factors, None)
    assert absent is None and torch.equal(sums, found[0])


def test_a_transposed_weight_is_read_as_it_is(backend: Backend) -> None:
    products = torch.randn(6, 40, device=backend.device)
    weight, factors = torch.randn(40, 6, device=backend.device).t(), products[:, 0]
    found = module(backend.implementation).scaled_gradients(
        products, weight, factors, torch.float32
    )
    torch.testing.assert_close(found[0], (products * weight).sum(1))
    torch.testing.assert_close(found[1], products * factors.unsqueeze(1))
