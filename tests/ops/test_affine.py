"""Norms that save z, and Linears behind their affine that save the same z: exact for every gamma."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import (
    Affine,
    LowRank,
    NormSettings,
    Recomputed,
    affine_linear,
    ms_norm,
)
from lowmem_patch.functional._implementation import module
from tests.ops.conftest import INTERPRETED, Backend, norm_grid
from tests.ops.test_norms import CASES, DTYPES, EPS, plain
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages, storage_of

DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def vectors(size: int, device: str, dtype: torch.dtype, centered: bool, offset: float) -> Any:
    """gamma and beta; a third of gamma is 0, where nothing could be divided."""
    weight = torch.randn(size, device=device)
    weight[::3] = 0.0
    bias = torch.randn(size, device=device).to(dtype).requires_grad_() if centered else None
    return (weight - offset).to(dtype).requires_grad_(), bias


@pytest.mark.parametrize(
    ("shape", "centered", "offset", "dtype"),
    norm_grid([(1, 1), (2, 3, 37), (33, 768), (3, 8200), (2, 16500), (0, 16)], CASES, DTYPES),
)
def test_norm_gradients_with_a_gamma_of_zero(
    backend: Backend, centered: bool, offset: float, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    device, size = backend.device, shape[-1]
    x = (torch.randn(shape, device=device) + 0.3).to(dtype).requires_grad_()
    weight, bias = vectors(size, device, dtype, centered, offset)
    dy = torch.randn(shape, device=device).to(dtype)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]

    def own() -> tuple[Tensor, Tensor]:
        y, _, z = ms_norm(
            x,
            weight,
            bias,
            NormSettings(EPS, offset, centered),
            z_dtype=dtype,
            implementation=backend.implementation,  # type: ignore[arg-type]
        )
        assert z is not None
        return y, z

    (y, z), saved = saved_storages(own)
    assert set(saved) - {storage_of(leaf) for leaf in leaves} - {storage_of(z)} <= {
        key for key, size in saved.items() if size <= 8 * max(1, x.numel() // shape[-1])
    }
    assert not z.requires_grad
    found = torch.autograd.grad(y, leaves, dy)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = plain(wide[0], wide[1], wide[2], offset, centered)  # type: ignore[arg-type]
    exact = torch.autograd.grad(truth, [t for t in wide if t is not None], dy.double())
    stock = plain(x, weight, bias, offset, centered)
    theirs = torch.autograd.grad(stock, leaves, dy)
    assert_within_budget(y, stock, truth)
    # what the rounding of z costs: half a unit, carried through the formulas
    wide_x = (
        wide[0].detach() - wide[0].detach().mean(-1, keepdim=True) if centered else wide[0].detach()
    )  # type: ignore[union-attr]
    rstd = (wide_x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    unit = torch.finfo(dtype).eps / 2 * (wide_x * rstd).abs()
    g = dy.double() * (weight.detach().double() + offset)
    along = (g.abs() * unit).mean(-1, keepdim=True)
    d_x = rstd * (
        unit * (g * wide_x * rstd).mean(-1, keepdim=True).abs() + (wide_x * rstd).abs() * along
    )
    d_weight = (dy.double().abs() * unit).reshape(-1, size).sum(0)
    extras = (d_x, d_weight, 0.0)
    for ours, other, right, extra in zip(found, theirs, exact, extras, strict=False):
        assert_within_budget(ours, other, right, extra)


@pytest.mark.parametrize("shape", [(1, 5), (2, 3, 37), (33, 768), (3, 20000), (0, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_affine_is_rounded_once(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    z = torch.randn(shape, device=backend.device).to(dtype)
    weight, bias = (torch.randn(shape[-1], device=backend.device) for _ in range(2))
    operations: Any = module(backend.implementation)
    for beta, offset in ((None, 0.0), (bias, 1.0)):
        y = operations.affine(z, weight, beta, NormSettings(EPS, offset), dtype)
        exact = z.double() * (weight.double() + offset) + (0.0 if beta is None else beta.double())
        assert_within_budget(y, exact.to(dtype), exact)


@pytest.mark.parametrize("rows", [6, 60], ids=["rows recomputed", "weights corrected"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_linear_gradients_with_a_gamma_of_zero(
    backend: Backend, adapted: bool, beta: bool, dtype: torch.dtype, rows: int
) -> None:
    if backend.implementation == "reference" and backend.device == "cuda":
        pytest.skip("the op chooses")
    device, size, outputs = backend.device, 24, 16
    z = torch.randn(2, rows // 2, size, device=device).to(dtype)
    gamma, shift = vectors(size, device, dtype, beta, 0.0)
    affine = Affine(gamma.detach(), None if shift is None else shift.detach(), NormSettings(EPS))
    weight = torch.randn(outputs, size, device=device).to(dtype).requires_grad_()
    bias = torch.randn(outputs, device=device).to(dtype).requires_grad_()
    lora_A = torch.randn(4, size, device=device).to(dtype).requires_grad_()
    lora_B = torch.randn(outputs, 4, device=device).to(dtype).requires_grad_()
    adapter = LowRank(lora_A, lora_B, 0.5) if adapted else None
    y = affine.of(z, dtype).requires_grad_()
    leaves = [y, weight, bias, *((lora_A, lora_B) if adapted else ())]
    out, saved = saved_storages(lambda: affine_linear(y, z, affine, weight, bias, dtype, adapter))
    assert storage_of(z) in saved and storage_of(y) not in saved
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)

    def step(wide: bool) -> tuple[Tensor, ...]:
        a, w, b, *low = (t.detach().to(torch.float64 if wide else dtype) for t in leaves)
        if wide:  # the true y
            a = z.double() * gamma.double() + (0.0 if shift is None else shift.double())
        copies = [t.detach().requires_grad_() for t in (a, w, b, *low)]
        result = F.linear(copies[0], copies[1], copies[2])
        if low:
            result = result + 0.5 * F.linear(F.linear(copies[0], copies[3]), copies[4])
        return torch.autograd.grad(result, copies, dout.to(result.dtype))

    exact, theirs = step(True), step(False)
    for name, ours, other, right in zip("ywbAB", found, theirs, exact, strict=False):
        error = (ours.double() - right).norm() / right.norm()
        own = (other.double() - right).norm() / right.norm()
        assert error <= 2 * own + torch.finfo(dtype).eps, (name, float(error), float(own))


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
def test_a_backward_of_a_part_holds_no_value() -> None:
    z, weights = torch.randn(6, 8), [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    affine = Affine(torch.randn(8), None, NormSettings(EPS))
    y = affine.of(z, z.dtype).requires_grad_()
    recomputed = Recomputed(y, z, affine)
    loss = sum(recomputed.linear(y, weight, None).square().sum() for weight in weights)
    made: list[Tensor] = []
    of = Affine.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Affine, "of", lambda *given: made.append(of(*given)) or made[-1])
        for asked, count in ((weights[:1], 1), (weights, 1), (weights, 1)):
            made.clear()
            torch.autograd.grad(loss, asked, retain_graph=True)
            assert len(made) == count and recomputed._value is None
